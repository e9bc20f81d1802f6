"""Checkpoints on disk: a folder per step that is there complete or not at all, and says if it was damaged.

checkpoints/step-00000120/...              what the program writes there
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
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcjobs.files import write_beside
from hpcjobs.runtime.streams import print_error
from hpcjobs.runtime.summary import write_json

FOLDER = "checkpoints"
REPLACED = ".replaced"
"""Ends the name of a checkpoint while another one of the same step takes its place."""
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
    """A checkpoint that is being written beside its place.

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

        `claim`: that of the process which makes and completes the checkpoint.
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

        One of the same step stays until this one is in its place.
        """
        if self.claim is not None:
            self.claim.require()
        number = 1 + max((_number_of(place) or 0 for place in steps(self.folder)), default=0)
        own = {"number": number, "job": name_job(os.environ)}
        write_json(self.path / MANIFEST, {**own, **asdict(self.meta), "files": dict(sums)})
        for inner in {(self.path / name).parent for name in sums} - {self.path}:
            sync_folder(inner)
        sync_folder(self.path)
        replaced = self.place.with_name(self.place.name + REPLACED)
        if self.place.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self.place.rename(replaced)
        self.path.rename(self.place)
        sync_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        try:
            point(self.folder / LATEST, self.place)
        except OSError as error:  # the checkpoint itself is complete
            print_error(f"warning: {self.folder / LATEST} can't be turned to {self.place.name}: {error.strerror}")
        return self.place

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def name_job(env: Mapping[str, str]) -> str | None:
    """What all attempts of a job share: its id, or that of torch's agent, which starts ranks again; None: by hand."""
    names = ("HPCJOBS_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
    return next((env[name] for name in names if env.get(name)), None)


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
    """Remove all but the newest `keep` sound checkpoints and the best, and what a killed writer left.

    Not what `owner` is writing, and not what can't be judged now.
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
        shutil.rmtree(place, ignore_errors=True)
    for left in folder.glob(".step-*"):
        if not left.name.endswith(f".{os.getpid() if owner is None else owner}"):
            shutil.rmtree(left, ignore_errors=True)


def recorded_loss(place: Path) -> float | None:
    """Held-out loss of a checkpoint; None where there is none to read, or it is not finite."""
    loss = (_read_manifest(place) or {}).get("loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def steps(folder: Path) -> list[Path]:
    """Newest first. Those whose manifest can't be read come before all others: nobody knows how old they are."""
    places = [place for place in folder.glob("step-*") if _step_of(place).isdecimal()]
    return sorted(places, key=_order, reverse=True)


def _step_of(place: Path) -> str:
    return place.name.removeprefix("step-").removesuffix(REPLACED)


def _order(place: Path) -> tuple[float, int]:
    number = _number_of(place)
    return math.inf if number is None else number, int(_step_of(place))


def _number_of(place: Path) -> int | None:
    """None: nobody knows. Checkpoints of earlier versions have none, and count as 0."""
    number = (_read_manifest(place) or {"number": None}).get("number", 0)
    return number if type(number) is int else None


def _read_manifest(place: Path) -> dict[str, Any] | None:
    """None: there is none, or it is none of a checkpoint."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def damage(place: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
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
    """The first file of a folder that is not as it was written, and how; None: all are. OSError if one is not there.

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

    `job`: only those that attempts of this job have written.
    """
    for place in steps(folder):
        if job is not None and (_read_manifest(place) or {}).get("job") != job:
            continue
        wrong = damage(place)
        yield place, wrong
        if wrong is None:
            return


def find_meta(place: Path) -> CheckpointMeta | None:
    """What the manifest of a checkpoint says of the run; None: there is none, or it is damaged."""
    try:
        return read_meta(_read_manifest(place) or {})
    except KeyError:
        return None


def read_meta(manifest: Mapping[str, Any]) -> CheckpointMeta:
    """What a manifest says of the run. Raises KeyError."""
    return CheckpointMeta(**{key: manifest[key] for key in CheckpointMeta.__dataclass_fields__})
