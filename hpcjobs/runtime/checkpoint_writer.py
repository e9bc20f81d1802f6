"""The thread that writes checkpoints, and the keeper that records them for the run's log and the job script.

`BackgroundWriter` copies the state and writes the copy in a thread. Training waits for the copy, and for the previous
write if saves come too fast; this stall is measured. A failed write does not end the run: earlier checkpoints stay, the
failure is reported, and later saves try again with growing pauses. At the end the last sound state is written.
"""

from __future__ import annotations

import errno
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hpcjobs.files import FULL
from hpcjobs.runtime.checkpoints import (
    BEST,
    CheckpointClaim,
    CheckpointMeta,
    Soundness,
    newest_valid,
    point,
    prune,
    recorded_loss,
)
from hpcjobs.runtime.exits import LossNotFinite, StorageFault, print_error
from hpcjobs.runtime.signals import JobControl

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Pause after a failed write; it doubles with each failure."""
INSISTING_PAUSE_S = 1.0
STORAGE_FULL = (*FULL, errno.EFBIG)
"""With the limit on the size of a file."""
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
        # by one clock: writing is a collective call of all writers, and a pause ends on none before the others
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

        Raises LossNotFinite: the newest saved state has NaN and is not written; a sound state before it is.
        """
        self.wait()
        refused, give_up = self._refused, time.monotonic() + within_s
        while self._unwritten is not None:
            meta, state, _ = self._unwritten
            self._try(meta, state)
            if self._unwritten is not None and self._agree(time.monotonic() >= give_up):
                fault = StorageFault(
                    f"step {meta.step} can't be saved in {self.folder}: {self._unwritten[2]}", hint=self._hint
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
            if error.errno in STORAGE_FULL and self._first:  # room for the next try: one good checkpoint is enough
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
            point(best, place)  # before old ones are removed, which keeps what this link names
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

        Raises StorageFault: with `blocking`, the storage does not take it in time.
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
