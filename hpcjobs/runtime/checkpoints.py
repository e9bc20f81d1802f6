"""Checkpoints on disk: a folder per step that is there complete or not at all, and says if it was damaged.

checkpoints/step-00000120/...              what the program writes there
checkpoints/step-00000120/manifest.json    step, position, world, size and CRC-32 of every file
checkpoints/latest, checkpoints/best       links to step folders
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcjobs.runtime.summary import write_json

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
BLOCK_BYTES = 1 << 22
Sums = Mapping[str, tuple[int, int]]
"""Size and CRC-32 by name of a file."""


@dataclass(frozen=True)
class CheckpointMeta:
    """Where in the run a checkpoint stands."""

    step: int  # finished steps
    epoch: int
    epoch_samples: int  # of all ranks, taken from this epoch
    world_size: int
    metrics_bytes: int
    loss: float | None  # held-out loss if it was evaluated at this step


class Draft:
    """A checkpoint that is being written beside its place.

    The folder's own parent is not made: a run folder that has vanished, say with its mount, is not to be filled in
    another place.
    """

    def __init__(self, folder: Path, meta: CheckpointMeta, *, owner: str | int | None = None) -> None:
        """`owner` names the writer, where several processes write one checkpoint; this process, if None."""
        self.folder, self.meta, self.owner = folder, meta, owner
        self.place = folder / f"step-{meta.step:08d}"
        self.path = folder / f".{self.place.name}.{os.getpid() if owner is None else owner}"

    def begin(self) -> None:
        """Make the folder for the files, empty."""
        self.discard()
        self.folder.mkdir(exist_ok=True)
        self.path.mkdir()

    def complete(self, sums: Sums) -> Path:
        """Account for every byte of the files, sync, and rename: from now on this is the newest checkpoint."""
        write_json(self.path / MANIFEST, {**asdict(self.meta), "files": dict(sums)})
        for inner in {(self.path / name).parent for name in sums} - {self.path}:
            sync_folder(inner)
        sync_folder(self.path)
        shutil.rmtree(self.place, ignore_errors=True)
        self.path.rename(self.place)
        sync_folder(self.folder)
        point(self.folder / LATEST, self.place)
        return self.place

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def measure(path: Path) -> tuple[int, int]:
    """Size and CRC-32, read in blocks; both calls let other threads run."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, place: Path) -> None:
    """Turn `link` to `place`; there is no moment without a link."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(place.name)
    beside.replace(link)


def prune(folder: Path, *, keep: int, owner: str | int | None = None) -> None:
    """Remove all but the newest `keep` and the best, and what a killed writer left; not what `owner` is writing."""
    best = (folder / BEST).resolve()
    for place in steps(folder)[keep:]:
        if place.resolve() != best:
            shutil.rmtree(place, ignore_errors=True)
    for left in folder.glob(".step-*"):
        if not left.name.endswith(f".{os.getpid() if owner is None else owner}"):
            shutil.rmtree(left, ignore_errors=True)


def recorded_loss(place: Path) -> float | None:
    """Held-out loss of a checkpoint; None where there is none to read, or it is not finite."""
    try:
        loss: float | None = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["loss"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if loss is None or not math.isfinite(loss) else loss


def steps(folder: Path) -> list[Path]:
    """Newest first."""
    places = [place for place in folder.glob("step-*") if place.name.removeprefix("step-").isdecimal()]
    return sorted(places, key=lambda place: int(place.name.removeprefix("step-")), reverse=True)


def damage(place: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        read_meta(manifest)
        return find_changed_file(place, manifest["files"])
    except OSError as error:
        return f"{error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is not the manifest of a checkpoint: {error!r}"


def find_changed_file(place: Path, sums: Sums) -> str | None:
    """The first file of a folder that is not as it was written, and how; None: all are. OSError if one is not there."""
    for name, (expected_size, expected_crc) in sums.items():
        size, crc = measure(place / name)
        if size != expected_size:
            return f"{name} has {size} bytes of {expected_size}"
        if crc != expected_crc:
            return f"{name} has checksum {crc:08x} instead of {expected_crc:08x}"
    return None


def newest_valid(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Each checkpoint looked at, newest first, with its damage; ends at the first sound one."""
    for place in steps(folder):
        wrong = damage(place)
        yield place, wrong
        if wrong is None:
            return


def find_meta(place: Path) -> CheckpointMeta | None:
    """What the manifest of a checkpoint says of the run; None: there is none, or it is damaged."""
    try:
        return read_meta(json.loads((place / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_meta(manifest: Mapping[str, Any]) -> CheckpointMeta:
    """What a manifest says of the run. Raises KeyError."""
    return CheckpointMeta(**{key: manifest[key] for key in CheckpointMeta.__dataclass_fields__})
