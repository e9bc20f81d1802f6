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

`StopAgreement` makes all ranks stop at the same boundary, without a collective call at every step. A boundary is a
place in the program that every rank passes equally often. All ranks write to and read from a board:

1. A rank that has got the signal writes a request.
2. A rank that has got the signal, or sees the request (it looks once a second), writes the number of its boundary, and
   from then on looks at every boundary.
3. When all ranks have written, rank 0 announces the boundary at which all stop, far enough ahead that no rank has
   passed it.

At its start, rank 0 removes the files that a killed start left on the board. The other ranks first read the board at a
boundary that they can pass only after rank 0 has passed one.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from hpcjobs.files import append_lines, write_beside
from hpcjobs.record.control import DEADLINE as DEADLINE_FILE
from hpcjobs.record.control import PROGRESS, REQUEUE, SIGNAL_BEFORE, STEPS, SUSPECTS
from hpcjobs.record.summary import Quantiles
from hpcjobs.runtime.exits import ExitCode, print_error

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


LOOK_S = 1.0
"""Between two looks for a request of another rank."""
RANKS_PER_LOOK = 1000
"""In larger worlds ranks look more rarely: the board gets at most this number of reads per second."""
REQUEST, ANNOUNCED = "request", "announced"
SIGNALS = (None, "SIGUSR1", "SIGTERM")
"""`reduce` gets the place of a rank's signal in this list."""
_FILES = ".stop-"


class Board(Protocol):
    """Short texts by name, which every rank sees once they are written."""

    def write(self, name: str, text: str) -> None: ...

    def read(self, name: str) -> str | None:
        """The text, or None: it is not written yet."""


class FileBoard:
    """A folder that all ranks see.

    The files are there before anybody reads them, and are written in place: opening a file asks a network file system
    for its newest content, while the absence of a file may be remembered for half a minute.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in (str(rank), *((REQUEST, ANNOUNCED) if rank == 0 else ())):
            os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600))

    def write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)  # rank 0 removes it when it has finished
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{text}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> str | None:
        try:
            text = (self.folder / name).read_text(encoding="ascii")
        except FileNotFoundError:
            return None
        return text.strip() if text.endswith("\n") else None


class StoreBoard:
    """The key-value store of torch's rendezvous."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def write(self, name: str, text: str) -> None:
        self._store.set(f"{self._prefix}/{name}", text)

    def read(self, name: str) -> str | None:
        key = f"{self._prefix}/{name}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except (
            RuntimeError
        ):  # the rank that holds the store has ended: at the end of a run, or the next collective fails
            return None

    def await_text(self, name: str) -> str:
        """The text, once it is written; the store's own time limit holds."""
        text: str = self._store.get(f"{self._prefix}/{name}").decode()
        return text


def find_store(prefix: str) -> StoreBoard | None:
    """The store of torch.distributed, where that is loaded and has met over one."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return None
    store = c10d._get_default_store()
    return None if store is None else StoreBoard(store, f"hpcjobs/{prefix}")


def open_board(folder: Path, attempt: str, *, rank: int) -> Board:
    """Open the store of torch.distributed if it is initialized, otherwise files below `folder`."""
    return find_store(f"stop/{attempt}") or FileBoard(folder / f"{_FILES}{attempt}", rank=rank)


def clear_board(folder: Path, attempt: str) -> None:
    """Remove the files of a start of the same name: started by hand, a run may have the same port again."""
    shutil.rmtree(folder / f"{_FILES}{attempt}", ignore_errors=True)


def name_attempt(env: Mapping[str, str]) -> str:
    """Return text that all ranks of one start share; other starts have other names.

    TORCHELASTIC_RESTART_COUNT cannot be used: each agent of torchrun counts separately. The port is new each time.
    """
    launch = next((env[name] for name in ("HPCJOBS_JOB_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE") if env.get(name)), "hand")
    counts = [env.get(name) or "0" for name in ("SLURM_RESTART_COUNT", "MASTER_PORT")]
    return "-".join("".join(c if c.isalnum() else "_" for c in text) for text in (launch, *counts))


class StopAgreement:
    """One rank's part. `decide` at every boundary gives every rank True for the first time at the same boundary."""

    def __init__(
        self,
        stop: Stop,
        *,
        rank: int,
        world_size: int,
        open_board: Callable[[], Board] | None = None,
        reduce: Callable[[int], int] | None,
        apart: int = 1,
    ) -> None:
        """`reduce`: the largest value of all ranks, called at every boundary in place of the board.

        `apart`: the largest number of boundaries between two ranks at any time.
        """
        self.stop, self.rank, self.world_size, self.apart = stop, rank, world_size, apart
        self.why: str | None = None
        """The signal, once all ranks stop."""
        self._open_board, self._reduce = open_board, reduce
        self._board: Board | None = None
        self._boundary = 0
        self._answered, self._announced = False, False
        self._look_s = LOOK_S * max(1.0, world_size / RANKS_PER_LOOK)
        self._look_at = 0.0

    def decide(self) -> bool:
        """Whether to stop here. On every rank equally often."""
        if self.why is not None:
            return True
        self._boundary += 1
        if self._reduce is not None:
            largest = int(self._reduce(SIGNALS.index(self.stop.requested)))
            self.why = SIGNALS[min(largest, len(SIGNALS) - 1)]
        elif self.world_size == 1:
            self.why = self.stop.requested
        elif self.rank == 0 or self._boundary > self.apart:
            self._ask_board()
        return self.why is not None

    def _ask_board(self) -> None:
        board = self._board
        if board is None:
            assert self._open_board is not None
            board = self._board = self._open_board()
        if not self._answered:
            now = time.monotonic()
            if self.stop.requested is None:
                if now < self._look_at:
                    return
                self._look_at = now + self._look_s
                if board.read(REQUEST) is None:
                    return
            else:
                board.write(REQUEST, self.stop.requested)
            board.write(str(self.rank), str(self._boundary))
            self._answered = True
        if self.rank == 0 and not self._announced:
            self._announce(board)
        announced = board.read(ANNOUNCED)
        if announced is not None and self._boundary >= int(announced):
            if self._boundary > int(announced):
                print_error(
                    f"warning: rank {self.rank} stops {self._boundary - int(announced)} steps after the others: ranks "
                    f"are more than {self.apart} apart. Hint: start(steps_apart=...)"
                )
            self.why = self.stop.requested or board.read(REQUEST) or "a signal"

    def _announce(self, board: Board) -> None:
        answers = [board.read(str(rank)) for rank in range(self.world_size)]
        numbers = [int(answer) for answer in answers if answer is not None]
        if len(numbers) == self.world_size:
            board.write(ANNOUNCED, str(max(self._boundary, *numbers) + self.apart + 1))
            self._announced = True

    def close(self) -> None:
        """Remove the board's files at the end."""
        if self.rank == 0 and isinstance(self._board, FileBoard):
            shutil.rmtree(self._board.folder, ignore_errors=True)
