"""The end of a script that does not call `finish()` or `leave()`: its last lines of metrics, and its error."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from hpcjobs.runtime.exits import ExitCode, TrainerError
from hpcjobs.runtime.streams import print_error

ExceptionHook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]
"""What `sys.excepthook` holds."""


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
        if sys.excepthook == self._handle:  # else another library has wrapped it, and would lose its own
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

    On the process's own standard error: torch.distributed calls hooks with another one, whose text it drops on exit.
    """
    if isinstance(error, TrainerError):
        sys.stderr = sys.__stderr__
        print_error(f"error: rank {os.environ.get('RANK', '0')}: {error}")
        raise SystemExit(int(error.code))
    sys.__excepthook__(kind, error, trace)
