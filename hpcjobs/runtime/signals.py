"""Stop on request and be started again: how a program continues after its time limit.

A job submitted with ``--retries`` tells its program by SIGUSR1 (ahead of the time limit) or SIGTERM
(ahead of a preemption) to save and leave. This is all a program needs, and it needs only the standard library:

    from hpcjobs.runtime import signals

    stop = signals.listen()
    step = load()                      # yours: the newest saved step, 0 at the first start
    while step < steps:
        step = train(step)
        if stop.requested:             # several ranks first agree: all_reduce(stop.requested is not None)
            save(step)
            signals.leave(step)        # exit code 85; the job goes back into the queue

Without Python, a program writes two files in the folder $HPCJOBS_CONTROL_DIR and ends with code 85, as ``leave`` does.
The file ``progress`` holds an integer that grows with each save; ``requeue`` holds the same integer, written when all
is saved and the program wants to be started again. docs/reliability.md has the rest.

`JobControl` reports finished and saved steps to the job script, and how early to send the signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hpcjobs.files import append_lines, write_beside
from hpcjobs.record.control import DEADLINE as DEADLINE_FILE
from hpcjobs.record.control import PROGRESS as PROGRESS
from hpcjobs.record.control import REQUEUE as REQUEUE
from hpcjobs.record.control import SIGNAL_BEFORE as SIGNAL_BEFORE
from hpcjobs.record.control import STEPS as STEPS
from hpcjobs.record.control import SUSPECTS as SUSPECTS
from hpcjobs.record.summary import Quantiles
from hpcjobs.runtime.exits import ExitCode

FOLDER = "HPCJOBS_CONTROL_DIR"
DEADLINE = "HPCJOBS_DEADLINE"
"""The end of the job's time limit in seconds since 1970, as known at its start; unset without a limit."""


class Stop:
    """The request to stop. Its handler only records the signal's name."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._owner = os.getpid()

    def note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner:
            self.requested = self.requested or signal.Signals(number).name
        elif number == signal.SIGTERM:  # a forked loader worker has inherited the handler: it is to end
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def listen(*numbers: int) -> Stop:
    """From now on SIGUSR1 and SIGTERM (or ``numbers``) only set ``requested``. From the main thread."""
    stop = Stop()
    listen_with(stop, *numbers)
    return stop


def listen_with(stop: Stop, *numbers: int) -> None:
    """Install the handlers of an existing `stop` again, after another library has replaced them."""
    for number in numbers or (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, stop.note)


def control_dir() -> Path | None:
    """Return the folder shared by job script and program; None if this program would not be started again."""
    return Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None


def read_deadline() -> float | None:
    """When the time limit ends the job, in seconds since 1970, as known last; None: none, or not known."""
    place, known = control_dir(), os.environ.get(DEADLINE) or None
    if place is not None:
        with contextlib.suppress(OSError):  # then the variable counts
            known = (place / DEADLINE_FILE).read_text(encoding="ascii").strip() or known
    return None if known is None or known == "inf" else float(known)


def record_progress(progress: int) -> None:
    """So much would survive now: a number that grows, such as the step of the checkpoint just written."""
    write_number(PROGRESS, progress)


def request_requeue(progress: int) -> None:
    """Everything up to ``progress`` is saved; this process is about to leave with code 85."""
    record_progress(progress)
    write_number(REQUEUE, progress)


def suspect(host: str) -> None:
    """The next start is to do without ``host``, if Slurm has enough others."""
    place = control_dir()
    if place is not None:
        append_lines(place / SUSPECTS, [host])


def ignore() -> None:
    """No signal any more: one that came while the interpreter ends would make a failure of it."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def leave(progress: int) -> NoReturn:
    """Exit with code 85 to be started again. One rank may call it; the others exit with 85."""
    request_requeue(progress)
    ignore()
    sys.exit(int(ExitCode.REQUEUE))


def write_number(name: str, number: int) -> None:
    """Put ``number`` into the job script's file ``name``, in one step."""
    place = control_dir()
    if place is not None:
        write_beside(place / name, f"{number}\n", mode=None, durable=False)


MARGIN_S = 20.0
"""For the way of a signal to the last rank, and of the job back into the queue."""
KILL_WAIT_S = 5.0
"""Seconds before the deadline; a later write may not complete."""
LAST_SAVE_S = 120.0
"""A run that ends or stops tries this long to write its last checkpoint."""


class JobControl:
    """One rank's side of the control directory. Without ``stop`` it has no effect."""

    def __init__(self, stop: Stop | None, *, rank: int) -> None:
        self.stop, self._rank = stop, rank
        place = control_dir() if stop is not None and rank == 0 else None
        self._steps: int | None = None
        if place is not None:
            with suppress(OSError):  # as below
                self._steps = os.open(place / STEPS, os.O_WRONLY | os.O_CREAT, 0o600)

    def close(self) -> None:
        if self._steps is not None:
            os.close(self._steps)
            self._steps = None

    def record_step(self, step: int) -> None:
        """Record the newest finished step, for the count of lost steps."""
        if self._steps is not None:
            try:
                os.pwrite(self._steps, b"%-12d\n" % step, 0)
            except OSError:  # the checkpoints report storage that fails; this number is for the history alone
                os.close(self._steps)
                self._steps = None

    def record_saved_step(self, step: int) -> None:
        """Record that `step` is on disk. Called by rank 0, from the thread that writes."""
        if self.stop is not None:
            with suppress(OSError):  # the checkpoint itself is on disk, and the next one is recorded again
                record_progress(step)

    def publish_times(self, step_s: Sequence[float], write_s: Sequence[float]) -> None:
        """Write how many seconds ahead this run needs its signal, from its measured times; only on rank 0."""
        if self.stop is None or self._rank != 0:
            return
        step, write = Quantiles.of(step_s), Quantiles.of(write_s)
        if step is not None and write is not None:
            with suppress(OSError):  # checkpoints report failing storage; the script keeps its value
                write_number(SIGNAL_BEFORE, math.ceil(2 * step.p95 + write.p95 + MARGIN_S))

    @property
    def left_s(self) -> float:
        """Seconds left for a save, by the current time limit."""
        deadline = None if self.stop is None else read_deadline()
        return math.inf if deadline is None else deadline - KILL_WAIT_S - time.time()

    @property
    def last_save_s(self) -> float:
        """Seconds that a run which ends or stops may spend on its last checkpoint."""
        return min(self.left_s, LAST_SAVE_S)
