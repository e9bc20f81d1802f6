"""Exit codes, the errors that carry them, the hooks that report an error at the end of a script, and its last output.

    TrainerError
    ├── UsageError          2   a flag or an environment variable can't be right
    ├── WorldMismatch      10   the processes that started are not the world the job asked for
    ├── RendezvousError    11   the processes did not find each other
    ├── OutOfMemory        12   the device or the host ran out of memory
    ├── LossNotFinite      13   the loss became NaN or infinite
    ├── MissingData        14   a data file or folder is not there
    ├── BadData            15   a data file is there but is damaged or has another format
    ├── UnequalData        16   ranks see different data
    ├── BadCheckpoint      17   no checkpoint can be loaded
    ├── PeerLost           18   another process went away in the middle of the run
    ├── Standstill         19   no rank has made a step for too long
    ├── StorageFault       20   the run folder can't be written any more
    ├── GpuFault           22   a GPU of this node has a hardware fault
    ├── BadConfiguration   23   GPUs, ranks, network interface or versions of NCCL don't fit together
    ├── Requeue            85   saved and stopped on request; no failure
    └── AlreadyReported     *   another rank has reported it; the code is that rank's

Any other exception is a bug and ends with a traceback and code 1.

Output is written also after its reader has ended: Python ends with code 120 if it cannot flush a stream at exit, and
with 1 if a print fails. Both would hide the program's exit code.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import TextIO


def print_error(text: str) -> None:
    """Print a line on standard error, or nowhere."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def flush() -> None:
    """Flush both streams before the interpreter does; output without a reader is discarded."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    """Redirect ``stream`` with its buffer to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


class ExitCode(IntEnum):
    OK = 0
    CRASH = 1
    USAGE = 2
    WORLD_MISMATCH = 10
    RENDEZVOUS = 11
    OUT_OF_MEMORY = 12
    LOSS_NOT_FINITE = 13
    MISSING_DATA = 14
    BAD_DATA = 15
    UNEQUAL_DATA = 16
    BAD_CHECKPOINT = 17
    PEER_LOST = 18
    STANDSTILL = 19
    STORAGE = 20
    CONTAINER = 21  # from the job script: the image cannot be started on this node
    GPU_FAULT = 22
    CONFIGURATION = 23
    REQUEUE = 85


class TrainerError(Exception):
    """One line for the user: the request, the error, and (the hint) the remedy."""

    code: int = ExitCode.CRASH
    elected = False  # True: the ranks have agreed that this one reports it

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = self.message if self.hint is None else f"{self.message}. Hint: {self.hint}"
        return " ".join(text.split())


class UsageError(TrainerError):
    code = ExitCode.USAGE


class WorldMismatch(TrainerError):
    code = ExitCode.WORLD_MISMATCH


class RendezvousError(TrainerError):
    code = ExitCode.RENDEZVOUS


class OutOfMemory(TrainerError):
    code = ExitCode.OUT_OF_MEMORY


class LossNotFinite(TrainerError):
    code = ExitCode.LOSS_NOT_FINITE


class MissingData(TrainerError):
    code = ExitCode.MISSING_DATA


class BadData(TrainerError):
    code = ExitCode.BAD_DATA


class UnequalData(TrainerError):
    code = ExitCode.UNEQUAL_DATA


class BadCheckpoint(TrainerError):
    code = ExitCode.BAD_CHECKPOINT


class PeerLost(TrainerError):
    code = ExitCode.PEER_LOST


class Standstill(TrainerError):
    code = ExitCode.STANDSTILL


class StorageFault(TrainerError):
    code = ExitCode.STORAGE


class GpuFault(TrainerError):
    code = ExitCode.GPU_FAULT


class BadConfiguration(TrainerError):
    code = ExitCode.CONFIGURATION


class Requeue(TrainerError):
    """All ranks have saved and leave together; the job script starts them again."""

    code = ExitCode.REQUEUE
    elected = True


class AlreadyReported(TrainerError):
    """Another rank has reported the error; this one ends silently with the same code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


ExceptionHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]
"""The type of `sys.excepthook`."""


class ExitHooks:
    """Until `remove()`: `flush` is called at the end of the program, and after an error `record` with code and message.

    Then `hook`, which was in place before, reports the error.
    """

    def __init__(
        self, run_dir: Path, flush: Callable[[], None], record: Callable[[int, str], None], *, hook: ExceptionHook
    ) -> None:
        self._run_dir, self._flush, self._record, self._hook = run_dir, flush, record, hook
        sys.excepthook = self._handle
        atexit.register(self._flush)

    def remove(self) -> None:
        if sys.excepthook == self._handle:  # a library that has wrapped our hook keeps its hook
            sys.excepthook = self._hook
        atexit.unregister(self._flush)

    def _handle(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._flush()
        if kind is not KeyboardInterrupt:
            code = error.code if isinstance(error, TrainerError) else ExitCode.CRASH
            try:
                self._record(int(code), " ".join(f"{kind.__name__}: {error}".split()))
            except OSError as full:  # the error itself is still to be reported
                print_error(f"warning: no summary in {self._run_dir}: {full}")
        if isinstance(error, TrainerError):
            report_error(kind, error, trace)
        self._hook(kind, error, trace)


def report_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error of ours as one line, and end with its exit code; print any other one as Python does.

    It prints on the original standard error: torch.distributed replaces it during hooks, and drops that text on exit.
    """
    if isinstance(error, TrainerError):
        sys.stderr = sys.__stderr__
        print_error(f"error: rank {os.environ.get('RANK', '0')}: {error}")
        raise SystemExit(int(error.code))
    sys.__excepthook__(kind, error, trace)
