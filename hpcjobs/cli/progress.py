"""Shows progress of long work on standard error: bars with time left on a terminal, lines on a pipe."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

from hpcjobs.cli.output import note
from hpcjobs.cli.terminal import raw
from hpcjobs.units import human_duration

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from hpcjobs.sweeps.sweep import Sweep


_SECONDS_PER_TENTH = 10.0
"""Between two lines on a pipe at least, while further tenths are done."""
_SECONDS_PER_LINE = 60.0
"""Between two lines on a pipe, while less than a tenth is done."""
_BAR_COLUMNS = 20
_COLUMNS = 80
"""Width of a terminal without a known size."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end the process; the cursor is shown again before they do."""
_SHOW_CURSOR = b"\n\x1b[?25h"


class _Begin(NamedTuple):
    """When work was first seen, and how much of it was done then."""

    time_s: float
    done: float


class _Line(NamedTuple):
    """The last line that was printed of a work."""

    time_s: float
    tenth: int
    text: str


class ProgressBars:
    """Bars for running work, used as a context manager: its end restores the terminal."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr  # rich replaces the stream, to print lines above the bars
        self.are_drawn = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._clock = clock
        self._begins: dict[str, _Begin] = {}
        self._lines: dict[str, _Line] = {}
        self._drawn: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._handled_signals: list[signal.Signals] = []

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn is not None:
            self._drawn.stop()
            for number in self._handled_signals:
                signal.signal(number, signal.SIG_DFL)

    def show(
        self, title: str, done: float, total: float | None, *, text: str, remaining_s: float | None = None
    ) -> None:
        """Show that ``done`` of ``total`` is done.

        Args:
            total: None where it is not known.
            text: text of a line, or behind the bar.
            remaining_s: None: estimated from the work done since the first call.
        """
        now = self._clock()
        begin = self._begins.setdefault(title, _Begin(now, done))
        if remaining_s is None and total is not None and done > begin.done:
            remaining_s = max(0.0, total - done) * (now - begin.time_s) / (done - begin.done)
        if self.are_drawn:
            self._draw(title, done, total, text, None if remaining_s is None else now + remaining_s)
        else:
            self._print(title, done, total, text, remaining_s)

    def remove(self, title: str) -> None:
        """Remove the bar of work that has ended."""
        if self._drawn is not None and title in self._tasks:
            self._drawn.remove_task(self._tasks.pop(title))

    def _print(self, title: str, done: float, total: float | None, text: str, remaining_s: float | None) -> None:
        now, tenth = self._clock(), int(10 * done / total) if total else 0
        last = self._lines.get(title)
        if last is not None and (total is None or done < total):
            pause = _SECONDS_PER_LINE if tenth == last.tenth else _SECONDS_PER_TENTH
            if now - last.time_s < pause or text == last.text:
                return
        elif last is not None and text == last.text:
            return
        self._lines[title] = _Line(now, tenth, text)
        note(f"{title}: {text}" + (f", {human_duration(remaining_s)} left" if remaining_s else ""))

    def _draw(self, title: str, done: float, total: float | None, text: str, ends_at: float | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        if self._drawn is None:
            rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._drawn = Progress(
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=_BAR_COLUMNS),
                TextColumn("{task.fields[text]}", markup=False, table_column=rest),
                TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True)),
                console=Console(file=raw(self._stream), highlight=False),
                expand=True,
                redirect_stdout=False,
                refresh_per_second=2,
            )
            self._fit()
            self._handle_signals()
            self._drawn.start()
        self._fit()
        if title not in self._tasks:
            self._tasks[title] = self._drawn.add_task(title, total=total, text="", left="")
        left = _Countdown(self._clock, ends_at)
        self._drawn.update(self._tasks[title], completed=done, total=total, text=text, left=left, refresh=done == total)

    def _handle_signals(self) -> None:
        """Show the cursor again before a signal ends the process: it would stay hidden in the user's shell."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows it in no other
        self._handled_signals = [one for one in _ENDING_SIGNALS if signal.getsignal(one) is signal.SIG_DFL]
        for number in self._handled_signals:
            signal.signal(number, self._end_by_signal)

    def _end_by_signal(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # after SIGHUP the terminal may be closed
            os.write(self._stream.fileno(), _SHOW_CURSOR)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _fit(self) -> None:
        """Rich looks at the terminal of standard input, which may be none."""
        if self._drawn is not None:
            self._drawn.console.width = os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS


class _Countdown:
    """The time left as text, each time that it is drawn."""

    def __init__(self, clock: Callable[[], float], ends_at: float | None) -> None:
        self._clock, self._ends_at = clock, ends_at

    def __str__(self) -> str:
        return "" if self._ends_at is None else f"{human_duration(max(0.0, self._ends_at - self._clock()))} left"


_NOT_ENDED = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING")


def wait_for_sweep(sweep: Sweep) -> int:
    """Wait with a bar of the cells that have ended; 0 if every cell succeeded."""
    title = f"sweep {sweep.definition.name}"
    with ProgressBars() as bars:

        def show(counts: Counter[str]) -> None:
            total = counts.total()
            ended = total - sum(counts[state] for state in _NOT_ENDED)
            states = ", ".join(f"{count} {state}" for state, count in sorted((+counts).items()))
            bars.show(title, ended, total, text=f"{ended} of {total} cells have ended: {states}")

        try:
            counts = sweep.wait(progress=show, report=note)
        except KeyboardInterrupt:
            name, quoted = sweep.definition.name, shlex.quote(sweep.definition.name)
            note(
                f"stopped waiting; sweep {name} continues: `hpcjobs sweep status {quoted}` shows it, "
                f"`hpcjobs sweep cancel {quoted}` cancels"
            )
            raise
    return 0 if set(+counts) <= {"COMPLETED"} else 1
