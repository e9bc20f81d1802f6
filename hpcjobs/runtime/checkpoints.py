"""Checkpoints on disk, each a folder that is complete or absent and has checksums.

checkpoints/step-00000120/...              the files of the program
checkpoints/step-00000120/manifest.json    number, job, step, position, world, size and CRC-32 of every file
checkpoints/latest, checkpoints/best       links to step folders

The newest checkpoint is the one with the highest number: each is given one more than all that are there when it is
completed. Its step does not order them: a run that starts over, or resumes from an earlier checkpoint, saves earlier
steps than it did before.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from hpcjobs.files import sync_folder, write_beside
from hpcjobs.record.summary import write_json
from hpcjobs.runtime.exits import BadCheckpoint, print_error

FOLDER = "checkpoints"
REPLACED = ".replaced"
"""In the name of a checkpoint while another one of its step takes its place; for good if it may not be removed."""
_NAME = re.compile(rf"step-(?P<step>\d+)({re.escape(REPLACED)}\d*)?")
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
BLOCK_BYTES = 1 << 22
Sums = Mapping[str, tuple[int, int]]
"""Size and CRC-32 by name of a file."""


@dataclass(frozen=True)
class CheckpointMeta:
    """The position of a checkpoint in the run."""

    step: int  # finished steps
    epoch: int
    epoch_samples: int  # of all ranks, taken from this epoch
    world_size: int
    metrics_bytes: int
    loss: float | None  # held-out loss if it was evaluated at this step


class CheckpointClaim:
    """The right of one start to write a run's checkpoints. A later start takes it, and the earlier one writes no more.

    Two starts run at once where Slurm took a node for dead that lives on, or where somebody starts a run twice. Both
    would remove each other's drafts and checkpoints.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: of the checkpoints. A claim that can't be written now is made at the first write."""
        self._path, self._token, self._made = folder.with_name(f".{folder.name}-writer"), uuid.uuid4().hex, False
        with suppress(OSError):  # storage that fails is reported where a checkpoint is to be written
            self._make()

    def require(self) -> None:
        """Raise OSError (EBUSY) if a later start has claimed the checkpoints."""
        if not self._made or not self._path.exists():
            self._make()
        elif self._path.read_text(encoding="ascii") != self._token:
            raise OSError(errno.EBUSY, "a later start of this run writes its checkpoints", str(self._path))

    def _make(self) -> None:
        write_beside(self._path, self._token, mode=None)
        self._made = True


class Draft:
    """A checkpoint under a temporary name, until it is complete.

    The folder's own parent is not made: a run folder that has vanished, say with its mount, is not to be filled in
    another place.
    """

    def __init__(
        self,
        folder: Path,
        meta: CheckpointMeta,
        *,
        claim: CheckpointClaim | None = None,
        owner: str | int | None = None,
    ) -> None:
        """`owner` names the writer, where several processes write one checkpoint; this process, if None.

        `claim`: of the process that makes and completes the checkpoint.
        """
        self.folder, self.meta, self.claim, self.owner = folder, meta, claim, owner
        self.place = folder / f"step-{meta.step:08d}"
        self.path = folder / f".{self.place.name}.{os.getpid() if owner is None else owner}"

    def begin(self) -> None:
        """Make the folder for the files, empty."""
        if self.claim is not None:
            self.claim.require()
        self.discard()
        self.folder.mkdir(exist_ok=True)
        self.path.mkdir()

    def complete(self, sums: Sums) -> Path:
        """Account for every byte of the files, sync, and rename: from now on this is the newest checkpoint.

        A checkpoint of the same step stays until this one is renamed.
        """
        if self.claim is not None:  # once more: a later start may have come while the files were written
            self.claim.require()
        number = 1 + max((_number_of(place) or 0 for place in steps(self.folder)), default=0)
        own = {"number": number, "job": name_job(os.environ)}
        write_json(self.path / MANIFEST, {**own, **asdict(self.meta), "files": dict(sums)})
        for inner in {(self.path / name).parent for name in sums} - {self.path}:
            sync_folder(inner)
        sync_folder(self.path)  # before the rename: a checkpoint with its final name is taken for complete
        if os.path.lexists(self.place):
            _remove_replaced(self.place)
            self.place.rename(_name_of_replaced(self.place))
        self.path.rename(self.place)
        sync_folder(self.folder)
        _remove_replaced(self.place)
        try:
            point(self.folder / LATEST, self.place)
        except OSError as error:  # the checkpoint itself is complete
            print_error(f"warning: {self.folder / LATEST} can't be turned to {self.place.name}: {error.strerror}")
        return self.place

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def name_job(env: Mapping[str, str]) -> str | None:
    """Return the id that all attempts of a job share, from the scheduler or torchrun; None if started by hand."""
    names = ("HPCJOBS_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    return next((env[name] for name in names if env.get(name)), None)


def measure(path: Path) -> tuple[int, int]:
    """Size and CRC-32, read in blocks; both calls let other threads run."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def point(link: Path, place: Path) -> None:
    """Point `link` to `place`; the link always exists."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(place.name)
    beside.replace(link)


def resume_from(folder: Path, *, report: Callable[[str], None], job: str | None = None) -> Path | None:
    """As `find_newest`, for a run that resumes: `latest` is turned to the checkpoint, as the run before may have been
    killed in between.

    Raises BadCheckpoint: there are checkpoints, and all are damaged.
    """
    newest = find_newest(folder, report=report, job=job)
    if newest is not None and (folder / LATEST).resolve() != newest.resolve():
        try:
            point(folder / LATEST, newest)
        except OSError as error:  # the next one that is written turns it
            report(f"warning: {folder / LATEST} can't be turned to {newest.name}: {error.strerror}")
    return newest


class Soundness:
    """Judges the checkpoints of one folder. Each is read completely once; after that, sizes alone are compared."""

    def __init__(self) -> None:
        self._read: set[tuple[str, int]] = set()

    def is_sound(self, place: Path) -> bool:
        """Raises OSError where the storage does not let it be judged."""
        try:
            key = place.name, (place / MANIFEST).stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if find_damage(place, contents=key not in self._read) is not None:
            return False
        self._read.add(key)
        return True


def prune(folder: Path, *, keep: int, soundness: Soundness, owner: str | int | None = None) -> None:
    """Remove all but the newest `keep` sound checkpoints and the best, and drafts of killed writers.

    Drafts of `owner` stay, and checkpoints that can't be read now.
    """
    best = (folder / BEST).resolve()
    sound = 0
    for place in steps(folder):
        try:
            if soundness.is_sound(place):
                sound += 1
                if sound <= keep or place.resolve() == best:
                    continue
        except OSError as error:
            print_error(f"warning: {place} can't be read, and stays: {error}")
            continue
        if not (place.is_symlink() and place.exists()):  # somebody wants that one
            _remove(place)
    for left in folder.glob(".step-*"):
        if not left.name.endswith(f".{os.getpid() if owner is None else owner}"):
            shutil.rmtree(left, ignore_errors=True)
    for link in (LATEST, BEST):
        for beside in folder.glob(f".{link}.*"):
            with suppress(OSError):
                beside.unlink()


def _remove_replaced(place: Path) -> None:
    for replaced in place.parent.glob(f"{place.name}{REPLACED}*"):
        if _NAME.fullmatch(replaced.name):
            _remove(replaced)


def _name_of_replaced(place: Path) -> Path:
    """A free name: a kill may have left the first one, or what has it may not be removed."""
    names = (place.with_name(f"{place.name}{REPLACED}{number or ''}") for number in count())
    return next(name for name in names if not os.path.lexists(name))


def _remove(place: Path) -> None:
    """Remove a checkpoint under another name: what a kill leaves of it is no damaged checkpoint.

    Of a link the link alone; what is protected, also in part, or another user's stays.
    """
    if place.is_symlink() or (place.is_file() and os.access(place, os.W_OK)):
        with suppress(OSError):
            place.unlink()
        return
    folders = [place, *(Path(parent, name) for parent, inner, _ in os.walk(place) for name in inner)]
    if (protected := next(filter(_is_protected, folders), None)) is not None:
        if protected != place:
            print_error(f"warning: {place} stays, since {protected} can't be changed")
        return
    aside = place.with_name(f".{place.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        place.rename(aside)
    except OSError:
        aside = place
    shutil.rmtree(aside, ignore_errors=True)


def _is_protected(folder: Path) -> bool:
    """Whether a folder can't be read or changed, and may have something in it."""
    if folder.is_symlink() or os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return False
    return not os.access(folder, os.R_OK | os.X_OK) or any(folder.iterdir())


def recorded_loss(place: Path) -> float | None:
    """Return the held-out loss of a checkpoint; None if it was not evaluated or is not finite."""
    loss = (_read_manifest(place) or {}).get("loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def steps(folder: Path) -> list[Path]:
    """List checkpoints, newest first. Checkpoints without a readable manifest come first: their age is unknown."""
    places = [(place, name) for place in folder.glob("step-*") if (name := _NAME.fullmatch(place.name))]
    return [place for place, _ in sorted(places, key=lambda one: (_age(one[0]), int(one[1]["step"])), reverse=True)]


def _age(place: Path) -> float:
    number = _number_of(place)
    return math.inf if number is None else number


def _number_of(place: Path) -> int | None:
    """Read the number; None if unknown. Checkpoints of earlier versions have no number, and count as 0."""
    number = (_read_manifest(place) or {"number": None}).get("number", 0)
    return number if type(number) is int else None


def _read_manifest(place: Path) -> dict[str, Any] | None:
    """Read the manifest; None if it is missing or not valid."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def damage(place: Path) -> str | None:
    """Describe the damage of a checkpoint; None: it is sound."""
    try:
        return find_damage(place)
    except OSError as error:
        return f"{error}"


def find_damage(place: Path, *, contents: bool = True) -> str | None:
    """As `damage`. OSError where the storage, not the checkpoint, is at fault. `contents`: compare checksums too."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        read_meta(manifest)
        return find_changed_file(place, manifest["files"], contents=contents)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        return f"{error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is not the manifest of a checkpoint: {error!r}"


def find_changed_file(place: Path, sums: Sums, *, contents: bool = True) -> str | None:
    """Describe the first changed file of a folder; None: all are unchanged. OSError if a file is missing.

    `contents`: compare checksums too.
    """
    for name, (expected_size, expected_crc) in sums.items():
        size = (place / name).stat().st_size
        if size != expected_size:
            return f"{name} has {size} bytes of {expected_size}"
        crc = measure(place / name)[1] if contents else expected_crc
        if crc != expected_crc:
            return f"{name} has checksum {crc:08x} instead of {expected_crc:08x}"
    return None


def newest_valid(folder: Path, *, job: str | None = None) -> Iterator[tuple[Path, str | None]]:
    """Each checkpoint looked at, newest first, with its damage; ends at the first sound one.

    `job`: only checkpoints of this job's attempts.
    """
    for place in steps(folder):
        if job is not None and (_read_manifest(place) or {}).get("job") != job:
            continue
        wrong = damage(place)
        yield place, wrong
        if wrong is None:
            return


def find_newest(
    folder: Path,
    *,
    report: Callable[[str], None],
    job: str | None = None,
    hint: str | None = "move the folder away to start over",
) -> Path | None:
    """Find the newest sound checkpoint, and report damaged ones; None if the folder has no checkpoint.

    Raises BadCheckpoint: there are checkpoints, and all are damaged.
    """
    damaged = 0
    for place, wrong in newest_valid(folder, job=job):
        if wrong is None:
            return place
        report(f"passing over the damaged checkpoint {place.name}: {wrong}")
        damaged += 1
    if damaged:
        raise BadCheckpoint(f"none of {damaged} checkpoints in {folder} is sound", hint=hint)
    return None


def find_meta(place: Path) -> CheckpointMeta | None:
    """Read the metadata of a checkpoint; None if the manifest is missing or damaged."""
    try:
        return read_meta(_read_manifest(place) or {})
    except KeyError:
        return None


def read_meta(manifest: Mapping[str, Any]) -> CheckpointMeta:
    """Take the metadata from a manifest. Raises KeyError."""
    return CheckpointMeta(**{key: manifest[key] for key in CheckpointMeta.__dataclass_fields__})
