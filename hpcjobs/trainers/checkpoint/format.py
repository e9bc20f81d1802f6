"""Checkpoints on disk: a folder per step that is there whole or not at all, and says if it was damaged.

checkpoints/step-00000120/state.pt        torch.save: model, optimizer, scaler, RNG by rank
checkpoints/step-00000120/parts/          what ranks hold in parts, by torch.distributed.checkpoint
checkpoints/step-00000120/manifest.json   step, position, world, size and CRC-32 of every file
checkpoints/latest, checkpoints/best      links to step folders
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hpcjobs.runtime.exits import BadCheckpoint
from hpcjobs.runtime.summary import write_json
from hpcjobs.trainers.checkpoint import sharded as parts

FOLDER = "checkpoints"
STATE, MANIFEST, PARTS = "state.pt", "manifest.json", "parts"
LATEST, BEST = "latest", "best"
BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class CheckpointMeta:
    """Where in the run a checkpoint stands."""

    step: int  # finished steps
    epoch: int
    epoch_samples: int  # of all ranks, taken from this epoch
    world_size: int
    metrics_bytes: int
    loss: float | None  # held-out loss if it was evaluated at this step


@dataclass(frozen=True)
class WriterGroup:
    """The ranks that write one checkpoint, each its parts; the first of them makes and renames its folder."""

    ranks: dist.ProcessGroup
    first: bool
    owner: int  # process id of the first


def write(folder: Path, meta: CheckpointMeta, state: Any, together: WriterGroup | None = None) -> Path:
    """Write one checkpoint beside its place, sync it, and rename it there; a collective call of ranks `together`.

    OSError leaves the checkpoints before it as they were, and takes no room. The folder's own parent is not
    made: a run folder that has vanished, say with its mount, is not to be filled in another place.
    """
    place = folder / f"step-{meta.step:08d}"
    beside = folder / f".{place.name}.{os.getpid() if together is None else together.owner}"
    tree, in_parts = parts.split_tensors(state)

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        _save(beside, tree)

    def complete(sums: parts.Sums) -> None:
        _seal(beside, meta, {f"{PARTS}/{name}": sum_ for name, sum_ in sums.items()})
        shutil.rmtree(place, ignore_errors=True)
        beside.rename(place)
        sync_folder(folder)
        point(folder / LATEST, place)

    try:
        if together is None:
            begin()
            complete({})
        else:
            writer = parts.Writer(beside / PARTS, measure=measure, begin=begin, complete=complete)
            parts.write(in_parts, writer, together.ranks)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return place


def _save(beside: Path, state: Any) -> None:
    """Without torch's own checksums, which it writes and never reads: the manifest has one of the whole file."""
    beside.mkdir()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with (beside / STATE).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch hides what its file said
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)


def _seal(beside: Path, meta: CheckpointMeta, sums: parts.Sums) -> None:
    """From now on every byte is accounted for."""
    sums = {STATE: measure(beside / STATE), **sums}
    write_json(beside / MANIFEST, {**asdict(meta), "files": sums})
    if len(sums) > 1:
        sync_folder(beside / PARTS)
    sync_folder(beside)


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


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` and the best, and what a killed writer left."""
    best = (folder / BEST).resolve()
    for place in steps(folder)[keep:]:
        if place.resolve() != best:
            shutil.rmtree(place, ignore_errors=True)
    for left in folder.glob(".step-*"):
        if not left.name.endswith(f".{os.getpid()}"):
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
    return sorted(folder.glob("step-*"), reverse=True)


def damage(place: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        _read_meta(manifest)
        for name, (wanted_size, wanted_crc) in manifest["files"].items():
            size, crc = measure(place / name)
            if size != wanted_size:
                return f"{name} has {size} bytes of {wanted_size}"
            if crc != wanted_crc:
                return f"{name} has checksum {crc:08x} instead of {wanted_crc:08x}"
    except OSError as error:
        return f"{error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is not the manifest of a checkpoint: {error!r}"
    return None


def newest_valid(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Each checkpoint looked at, newest first, with its damage; ends at the first sound one."""
    for place in steps(folder):
        wrong = damage(place)
        yield place, wrong
        if wrong is None:
            return


def read(
    place: Path, placed: Callable[[parts.Where], torch.Tensor | None] = lambda where: None
) -> tuple[CheckpointMeta, Any]:
    """A checkpoint's metadata and state, in host memory; only plain values and tensors are unpickled.

    A collective call where the checkpoint was written in parts; these are read into what `placed` has for them.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        state = torch.load(place / STATE, map_location="cpu", weights_only=True)
        if (place / PARTS).is_dir():
            state = parts.read(place / PARTS, state, placed)
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise BadCheckpoint(f"{place} can't be loaded: {error}") from error
    return _read_meta(manifest), state


def _read_meta(manifest: dict[str, Any]) -> CheckpointMeta:
    return CheckpointMeta(**{key: manifest[key] for key in CheckpointMeta.__dataclass_fields__})
