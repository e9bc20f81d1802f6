"""Reads WebDataset's tar shards by number: in any order, at any world size, from any place on.

A sample is all files of a shard with the same name up to the first dot, such as `0001.jpg` and `0001.cls`. Headers
are read once, and written to `SHARD.index` in the folder of the shard, if possible.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hpcjobs.files import write_beside
from hpcjobs.runtime.exits import BadData, MissingData

Member = tuple[str, str, int, int]
"""Sample, extension, first byte, number of bytes."""


@dataclass(frozen=True)
class TarShards:
    """Samples as dicts of bytes by extension, and `__key__`: a map-style dataset."""

    paths: tuple[Path, ...]
    samples: Sequence[tuple[int, str, dict[str, tuple[int, int]]]]
    """Number of the shard, key, and place of each file in it."""

    @classmethod
    def open(cls, paths: Sequence[Path | str]) -> TarShards:
        """All samples of the shards, in their order.

        Raises MissingData: a shard does not exist. BadData: it is compressed, or not a tar file.
        """
        shards = tuple(Path(path) for path in paths)
        samples = []
        for number, path in enumerate(shards):
            parts: dict[str, dict[str, tuple[int, int]]] = {}
            for key, extension, first, size in read_index(path):
                parts.setdefault(key, {})[extension] = first, size
            samples += [(number, key, places) for key, places in parts.items()]
        return cls(shards, samples)

    def choose(self, numbers: Sequence[int]) -> TarShards:
        """Some of the samples."""
        return TarShards(self.paths, [self.samples[number] for number in numbers])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        shard, key, places = self.samples[index]
        return {"__key__": key.encode(), **{name: self._read(shard, *place) for name, place in places.items()}}

    def read_parts(self, extension: str) -> Iterator[bytes]:
        """One file of every sample that has it."""
        for shard, _, places in self.samples:
            if extension in places:
                yield self._read(shard, *places[extension])

    def name(self, index: int) -> str:
        shard, key, _ = self.samples[index]
        return f"{key} in {self.paths[shard]}"

    def __getstate__(self) -> dict[str, object]:
        """For worker processes, which map the shards themselves."""
        return {"paths": self.paths, "samples": self.samples}

    def _read(self, shard: int, first: int, size: int) -> bytes:
        return self._maps[shard][first : first + size].tobytes()

    @cached_property
    def _maps(self) -> list[np.memmap[tuple[int], np.dtype[np.uint8]]]:
        """Mapped, so that reading needs no file position, which processes would share."""
        return [np.memmap(path, dtype=np.uint8, mode="r") for path in self.paths]


def read_index(path: Path) -> list[Member]:
    """The files of a shard; from its index, where that is not older."""
    index = path.with_name(f"{path.name}.index")
    try:
        if index.stat().st_mtime_ns >= path.stat().st_mtime_ns:
            lines = index.read_text(encoding="utf-8").splitlines()
            return [
                (key, name, int(first), int(size)) for key, name, first, size in (line.split("\t") for line in lines)
            ]
    except (FileNotFoundError, ValueError):  # the index is missing or has another format: read the shard
        pass
    members = list(_scan(path))
    text = "".join("\t".join(map(str, member)) + "\n" for member in members)
    with suppress(OSError):  # the folder is not writable: the shard is read again next time
        write_beside(index, text, mode=None, durable=False)
    return members


def _scan(path: Path) -> Iterator[Member]:
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isfile():
                    folder, slash, file = member.name.rpartition("/")
                    stem, _, extension = file.partition(".")
                    yield f"{folder}{slash}{stem}", extension, member.offset_data, member.size
    except FileNotFoundError as error:
        raise MissingData(f"{path}: no such file") from error
    except (OSError, tarfile.TarError) as error:
        raise BadData(f"{path} can't be read as a tar file: {error}", hint="shards must not be compressed") from error
