"""Checkpoints on disk, each a folder that is complete or absent and has checksums; and the thread that writes them.

checkpoints/step-00000120/...              the files of the program
checkpoints/step-00000120/manifest.json    number, job, step, position, world, size and CRC-32 of every file
checkpoints/latest, checkpoints/best       links to step folders

The newest checkpoint is the one with the highest number: each is given one more than all that are there when it is
completed. Its step does not order them: a run that starts over, or resumes from an earlier checkpoint, saves earlier
steps than it did before.

`BackgroundWriter` copies the state and writes the copy in a thread. Training waits for the copy, and for the previous
write if saves come too fast; this stall is measured. A failed write does not end the run: earlier checkpoints stay, the
failure is reported, and later saves try again with growing pauses. At the end the last sound state is written.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcjobs.files import write_beside
from hpcjobs.record.summary import write_json
from hpcjobs.runtime.exits import BadCheckpoint, LossNotFinite, StorageFault
from hpcjobs.runtime.signals import JobControl
from hpcjobs.runtime.streams import print_error

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


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point(link: Path, place: Path) -> None:
    """Point `link` to `place`; the link always exists."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(place.name)
    beside.replace(link)


def resume_from(folder: Path, *, report: Callable[[str], None], job: str | None = None) -> Path | None:
    """As `find_newest`, for a run that resumes: `latest` is turned to the checkpoint, as the run before may have been
    killed in between.

    Raises:
        BadCheckpoint: there are checkpoints, and all are damaged.
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
        shutil.rmtree(place, ignore_errors=True)
    for left in folder.glob(".step-*"):
        if not left.name.endswith(f".{os.getpid() if owner is None else owner}"):
            shutil.rmtree(left, ignore_errors=True)
    for link in (LATEST, BEST):
        for beside in folder.glob(f".{link}.*"):
            with suppress(OSError):
                beside.unlink()


def recorded_loss(place: Path) -> float | None:
    """Return the held-out loss of a checkpoint; None if it was not evaluated or is not finite."""
    loss = (_read_manifest(place) or {}).get("loss")
    return loss if isinstance(loss, int | float) and math.isfinite(loss) else None


def steps(folder: Path) -> list[Path]:
    """List checkpoints, newest first. Checkpoints without a readable manifest come first: their age is unknown."""
    places = [place for place in folder.glob("step-*") if _step_of(place).isdecimal()]
    return sorted(places, key=_order, reverse=True)


def _step_of(place: Path) -> str:
    return place.name.removeprefix("step-").removesuffix(REPLACED)


def _order(place: Path) -> tuple[float, int]:
    number = _number_of(place)
    return math.inf if number is None else number, int(_step_of(place))


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

    Raises:
        BadCheckpoint: there are checkpoints, and all are damaged.
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


FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pause after a failed write; it doubles with each failure."""
INSISTING_PAUSE_S = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FULL_HINT = "free space or quota there; the checkpoints before it are complete, the next start finds them"
BUSY_HINT = "one start at a time may run in a run folder; the later one continues"


class BackgroundWriter(ABC):
    """One writer, or one of several that write together, each its parts; the first of them has the say.

    `stall_s` has one number per save, `write_s` one per checkpoint on disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        background: bool,
        on_written: Callable[[int], None] = lambda step: None,
        first: bool = True,
        owner: str | int | None = None,
        agree: Callable[[bool], bool] = lambda mine: mine,
    ) -> None:
        """`on_written` is called, from the thread that writes, with the step of each checkpoint on disk.

        `agree` returns the first writer's decision on every writer; `owner` names their drafts.
        """
        self.folder, self.keep, self.background, self.on_written = folder, keep, background, on_written
        self._first, self.owner, self._agree = first, owner, agree
        self.claim = CheckpointClaim(folder) if first else None
        self.stall_s: list[float] = []
        self.write_s: list[float] = []
        self.soundness = Soundness()
        self.best_loss = recorded_loss(folder / BEST)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._newest: int | None = None  # step of the newest on disk
        self._unwritten: tuple[CheckpointMeta, Any, str] | None = None  # a copy saved since, and why it is not there
        self._hint = FULL_HINT
        self._refused: LossNotFinite | None = None  # of the state that was saved last
        self._stalled: dict[int, float] = {}  # by step, of saves that `take_written` did not report yet
        self._written: list[int] = []
        self._pause_s, self._not_before = FIRST_PAUSE_S, 0.0

    @abstractmethod
    def copy_state(self, state: Any) -> Any:
        """Copy the state for the thread that writes it."""

    @abstractmethod
    def write_files(self, meta: CheckpointMeta, state: Any) -> Path:
        """Write one checkpoint; its folder. OSError if the storage fails."""

    def find_refusal(self, state: Any) -> LossNotFinite | None:
        """Why this state is not to be written, where that is known before it is copied."""
        return None

    def save(self, meta: CheckpointMeta, state: Any, *, last: bool) -> None:
        """Write `state`, now or soon. While the storage is given time to recover it is kept, for the next try.

        `last`: there will be no later one, so it is tried in any case.
        """
        began = time.perf_counter()
        self.wait()  # the copy before is still being written
        self._refused = None
        if self._unwritten is not None and (refusal := self.find_refusal(state)):  # it would take the place of that one
            self._refuse(meta, refusal)
            return
        due = self._agree(last or time.monotonic() >= self._not_before)
        if due and not self.background:
            self._try(meta, state)
            if self._unwritten is not None:  # by the next try the state itself will be another one
                self._unwritten = meta, self.copy_state(state), self._unwritten[2]
        else:
            copied = self.copy_state(state)
            if due:
                self._writing = self._thread.submit(self._try, meta, copied)
            else:
                self._unwritten = meta, copied, "" if self._unwritten is None else self._unwritten[2]
        self.stall_s.append(time.perf_counter() - began)
        self._stalled[meta.step] = self.stall_s[-1]

    def take_written(self) -> list[tuple[int, float]]:
        """Steps of the checkpoints that came to the disk since the last call, with the time each held up the run."""
        written, self._written = self._written, []
        return [(step, self._stalled.pop(step)) for step in written if step in self._stalled]

    def save_blocking(self, meta: CheckpointMeta, state: Any, *, within_s: float) -> None:
        """Have `state` on disk; StorageFault if that does not succeed in time."""
        self.wait()
        if self._newest != meta.step:
            self._unwritten = meta, state, ""
            self.finish(within_s=within_s)

    def finish(self, *, within_s: float) -> None:
        """Write the newest saved state; StorageFault if that does not succeed in time.

        Raises:
            LossNotFinite: the newest saved state has NaN and is not written; a sound state before it is.
        """
        self.wait()
        refused, give_up = self._refused, time.monotonic() + within_s
        while self._unwritten is not None:
            meta, state, _ = self._unwritten
            self._try(meta, state)
            if self._unwritten is not None and self._agree(time.monotonic() >= give_up):
                fault = StorageFault(
                    f"step {meta.step} can't be saved in {self.folder}: {self._unwritten[2]}",
                    hint=self._hint,
                )
                if refused is None:
                    raise fault
                print_error(f"warning: {fault}")
                break
            if self._unwritten is not None:
                time.sleep(INSISTING_PAUSE_S)
        if refused := refused or self._refused:
            raise refused

    def wait(self) -> None:
        """Wait for the write in progress."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _try(self, meta: CheckpointMeta, state: Any) -> None:
        began = time.perf_counter()
        self._refused = None
        try:
            place = self.write_files(meta, state)
        except OSError as error:
            if error.errno in FULL and self._first:  # room for the next try: one good checkpoint is enough
                self._prune(keep=1)
            self._note_failure(meta, state, error)
            return
        except LossNotFinite as error:
            self._unwritten = None  # a kept one's copy was overwritten
            self._refuse(meta, error)
            return
        self.write_s.append(time.perf_counter() - began)
        self._written.append(meta.step)
        if self._unwritten is not None and self._unwritten[2] and self._first:
            print(f"checkpoint of step {meta.step} is written: {self.folder} can be written again", flush=True)
        self._newest = meta.step
        self._unwritten, self._pause_s, self._not_before = None, FIRST_PAUSE_S, 0.0
        if self._first:
            try:
                self._record(meta, place)
            except OSError as error:  # the checkpoint itself is complete
                print_error(f"warning: {place.name} is written, but not recorded: {error}")

    def _refuse(self, meta: CheckpointMeta, error: LossNotFinite) -> None:
        self._refused = error
        if self._first:
            left = f"; step {self._unwritten[0].step} is still to be written" if self._unwritten is not None else ""
            print_error(f"warning: checkpoint of step {meta.step} not written: {error}; {self._describe_last()}{left}")

    def _record(self, meta: CheckpointMeta, place: Path) -> None:
        """Report a checkpoint that is on disk, and remove old ones."""
        self.on_written(meta.step)
        best = self.folder / BEST
        was = best.resolve()
        if was == place.resolve() or (self.best_loss is not None and not self.soundness.is_sound(was)):
            self.best_loss = None  # the state with that loss was replaced by this one, or is damaged and removed below
        loss = meta.loss if meta.loss is not None and math.isfinite(meta.loss) else None  # no loss is less than NaN
        if loss is not None and (self.best_loss is None or loss < self.best_loss):
            point(best, place)
            self.best_loss = loss
        self._prune(keep=self.keep)

    def _prune(self, *, keep: int) -> None:
        prune(self.folder, keep=keep, soundness=self.soundness, owner=self.owner)

    def _describe_last(self) -> str:
        for place, wrong in newest_valid(self.folder):
            if wrong is None:
                return f"the last good one is {place.name}"
        return "none before it"

    def _note_failure(self, meta: CheckpointMeta, state: Any, error: OSError) -> None:
        why = error.strerror or str(error)
        news = self._unwritten is None or self._unwritten[2] != why or self._unwritten[0].step != meta.step
        if news and self._first:
            print_error(
                f"warning: checkpoint of step {meta.step} not written: {why}; {self._describe_last()}; the run "
                f"goes on, saves are tried again after {self._pause_s:.0f} s"
            )
        self._unwritten = meta, state, why
        self._hint = BUSY_HINT if error.errno == errno.EBUSY else FULL_HINT
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class CheckpointKeeper:
    """Writes the checkpoints of one rank's run, and reports them to the run's log and the job script."""

    def __init__(
        self,
        writer: BackgroundWriter,
        control: JobControl,
        *,
        record: Callable[[int, float], None],
        step_s: Callable[[], Sequence[float]],
    ) -> None:
        """`record` gets the step of each checkpoint on disk, and the seconds that it held up the run.

        `step_s`: the newest times of steps, in seconds.
        """
        self._writer, self._control, self._record, self._step_s = writer, control, record, step_s

    def write(self, meta: CheckpointMeta, state: Any, *, last: bool = False, blocking: bool = False) -> None:
        """Write `state`, now or soon (`last`: there will be no later one); `blocking`: it is on disk after this.

        Raises:
            StorageFault: with `blocking`, the storage does not take it in time.
        """
        if blocking:
            self._writer.save_blocking(meta, state, within_s=self._control.last_save_s)
        else:
            self._writer.save(meta, state, last=last)
        self.record_written()
        self._control.publish_times(self._step_s(), self._writer.write_s)

    def record_written(self) -> None:
        """Record each checkpoint that came to the disk since the last call."""
        for step, stall_s in self._writer.take_written():
            self._record(step, stall_s)

    def finish(self) -> None:
        """Wait until the newest saved state is on disk. Raises StorageFault and LossNotFinite, as the writer's."""
        self._writer.finish(within_s=self._control.last_save_s)
        self.record_written()

    def close(self) -> None:
        self._writer.close()

    @property
    def stall_s(self) -> Sequence[float]:
        """Seconds that each save held up the run."""
        return self._writer.stall_s
