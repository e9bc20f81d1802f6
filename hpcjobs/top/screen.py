"""The screen of ``hpcjobs top``, drawn with textual: it shows the results of `rows` and `text`, and calls `Actions`.

One thread at a time asks the scheduler or reads files, and hands its result to the screen. Only the visible lines of
the table are made into text, so a thousand rows cost as much as fifty.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ClassVar

from rich.text import Text as RichText
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.events import Resize
from textual.message import Message
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import DataTable, Footer, Input, Static

from hpcjobs.errors import HpcJobsError
from hpcjobs.printable import printable, printable_document, printable_line
from hpcjobs.processes.programs import run_in_terminal
from hpcjobs.scheduler.base import choose_colour
from hpcjobs.top.look import Actions, Looker
from hpcjobs.top.rows import SORTS, JobRow, Snapshot, View, make_rows
from hpcjobs.top.text import Column, cells, choose_columns, describe, headline, titles


class ThreadCall(Message):
    """A call that a thread hands to the screen, without waiting for it: the screen may be about to end."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call


class PlainText(Static):
    """Lines that the terminal shows and does not obey."""

    def __init__(self, text: str = "", *, id: str) -> None:
        super().__init__(printable(text), id=id, markup=False)

    def show(self, text: str) -> None:
        """Replace the text."""
        self.update(printable(text))

    def show_document(self, text: str) -> None:
        """Show a log or an explanation, with its colours."""
        self.update(RichText.from_ansi(printable_document(text)))


class LineViewer(ModalScreen[None]):
    """Lines to read: a log, which is read again and again, or an explanation."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Back"),
        Binding("end", "end", "End", show=False),
    ]
    CSS = "LineViewer { background: $surface; } #title { background: $primary; color: $text; width: 100%; }"

    def __init__(self, title: str, read: Callable[[], list[str]], *, again_s: float | None) -> None:
        super().__init__()
        self._title, self._read, self._again_s = title, read, again_s
        self._text: str | None = None

    def compose(self) -> ComposeResult:
        yield PlainText(printable_line(self._title), id="title")
        with VerticalScroll(id="scroll"):
            yield PlainText("reading …", id="lines")
        yield Footer()

    def on_mount(self) -> None:
        self._start()
        if self._again_s is not None:
            self.set_interval(self._again_s, self._start)

    def _start(self) -> None:
        self.run_worker(self._read_lines, thread=True, exclusive=True)

    def _read_lines(self) -> None:
        try:
            lines = self._read()
        except (HpcJobsError, OSError) as error:
            lines = [str(error)]
        self.post_message(ThreadCall(partial(self._show, lines)))

    def _show(self, lines: list[str]) -> None:
        text = "\n".join(lines) or "(nothing yet)"
        if text == self._text or not self.is_attached:
            return
        scroll = self.query_one("#scroll", VerticalScroll)
        at_end = self._text is None or scroll.scroll_offset.y >= scroll.max_scroll_y
        self._text = text
        self.query_one("#lines", PlainText).show_document(text)
        if at_end and self._again_s is not None:
            scroll.scroll_end(animate=False)

    def action_end(self) -> None:
        self.query_one("#scroll", VerticalScroll).scroll_end(animate=False)


class Confirmation(ModalScreen[bool]):
    """Yes or no; anything but y is no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,enter,q", "answer(False)", "No"),
    ]
    CSS = """
    Confirmation { align: center middle; }
    #question { width: auto; height: auto; padding: 1 2; border: round red; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield PlainText(f"{printable_line(self._text)}\n\ny: yes   n: no", id="question")

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


ASK_S, ASK_RARELY_S = 5.0, 60.0
"""Seconds between two queries of the scheduler: at first and after a change, and at most."""
_SLOWER = 1.5
READ_S = 2.0
"""Between two looks at the files of running jobs."""


class Refresh:
    """Keeps ``snapshot`` up to date, and calls ``show`` after each look; ``busy`` while a thread asks or reads.

    ``unfolded`` returns the keys of the groups with all tasks on the screen.
    """

    def __init__(
        self,
        app: App[Exception],
        looker: Looker,
        first: Snapshot,
        *,
        unfolded: Callable[[], Collection[str]],
        show: Callable[[], None],
    ) -> None:
        self.looker, self.snapshot, self.every_s = looker, first, ASK_S
        self._app, self._unfolded, self._show = app, unfolded, show
        self._asking: Timer | None = None
        self.busy = self._ask_next = False

    def start(self) -> None:
        """Begin to ask and to read from time to time."""
        self._asking = self._app.set_timer(self.every_s, self._ask)
        self._app.set_interval(READ_S, self._read_if_visible)

    def ask_soon(self) -> None:
        """Ask the scheduler now, and often again."""
        self._stop_timer()
        self.every_s = ASK_S
        self._ask()

    def read(self) -> None:
        """Read the files of running jobs now, unless something is asked or read just then."""
        if not self.busy:
            self.busy = True
            self._in_thread(partial(self.looker.reread, self.snapshot), self._take)

    def _read_if_visible(self) -> None:
        if self._app.screen is self._app.screen_stack[0]:
            self.read()

    def _ask(self) -> None:
        if self.busy:
            self._ask_next = True
            return
        self.busy, self._ask_next = True, False
        self._in_thread(self.looker.look, self._take_answer)

    def _in_thread(self, look: Callable[..., Snapshot], then: Callable[[Snapshot], None]) -> None:
        self._app.run_worker(partial(self._look, look, then), thread=True)

    def _look(self, look: Callable[..., Snapshot], then: Callable[[Snapshot], None]) -> None:
        try:
            snapshot = look(unfolded=self._unfolded())
        except HpcJobsError as error:
            snapshot = self.snapshot._replace(errors=(str(error),))
        except Exception as error:  # the command line explains it
            self._app.post_message(ThreadCall(partial(self._app.exit, error)))
            return
        self._app.post_message(ThreadCall(partial(then, snapshot)))

    def _take_answer(self, snapshot: Snapshot) -> None:
        changed = snapshot.changes_from(self.snapshot)
        self.every_s = ASK_S if changed else min(ASK_RARELY_S, self.every_s * _SLOWER)
        self._stop_timer()
        self._asking = self._app.set_timer(self.every_s, self._ask)
        self._take(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        self.busy, self.snapshot = False, snapshot
        self._show()
        if self._ask_next:
            self._ask()

    def _stop_timer(self) -> None:
        if self._asking is not None:
            self._asking.stop()


_SCROLLBAR = 2


class JobTable(DataTable[RichText], inherit_bindings=False):
    """Rows below the titles of their columns, with a cursor on one of them. Cells that did not change stay."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "cursor_up", show=False),
        Binding("down", "cursor_down", show=False),
        Binding("pageup", "page_up", show=False),
        Binding("pagedown", "page_down", show=False),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]
    DEFAULT_CSS = "JobTable { overflow-x: hidden; }"

    def __init__(self, *, id: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0)
        self._clock = clock
        self.jobs: Sequence[JobRow] = ()
        self._shown: list[list[RichText]] = []
        self._titles: list[str] = []

    @property
    def chosen(self) -> JobRow | None:
        """The row that the cursor is on."""
        return self.jobs[self.cursor_row] if self.cursor_row < len(self.jobs) else None

    def show(self, jobs: Sequence[JobRow]) -> None:
        """Show these rows; the cursor stays on its job, or on its line."""
        before, number, scrolled = self.chosen, self.cursor_row, self.scroll_y
        keys = [row.key for row in jobs]
        same = keys == [row.key for row in self.jobs]
        columns = choose_columns(self.outer_size.width - _SCROLLBAR, jobs, self._clock())
        heads = titles(columns)
        cells_shown = [self._cells(row, columns) for row in jobs]
        self.jobs = jobs
        if same and heads == self._titles:
            self._update(cells_shown)
            return
        self._titles, self._shown = heads, cells_shown
        with self.prevent(DataTable.RowHighlighted):
            self.clear(columns=True)
            for title, column in zip(heads, columns, strict=True):
                self.add_column(title, width=column.width + 1, key=column.title)
            for key, texts in zip(keys, cells_shown, strict=True):
                self.add_row(*texts, key=key)
            number = keys.index(before.key) if before is not None and before.key in keys else number
            self.move_cursor(row=min(number, max(0, len(jobs) - 1)), scroll=False)
        self.call_after_refresh(self._scroll_back, scrolled)

    def _scroll_back(self, scrolled: float) -> None:
        """Show the rows that were visible before, and the cursor."""
        self.scroll_to(y=scrolled, animate=False)
        self.move_cursor(row=self.cursor_row)

    def _update(self, cells_shown: list[list[RichText]]) -> None:
        for number, (old, new) in enumerate(zip(self._shown, cells_shown, strict=True)):
            for column, (before, now) in enumerate(zip(old, new, strict=True)):
                if before.plain != now.plain or before.style != now.style:
                    self.update_cell_at(Coordinate(number, column), now)
        self._shown = cells_shown

    def _cells(self, row: JobRow, columns: Sequence[Column]) -> list[RichText]:
        texts = zip(cells(row, columns, self._clock()), columns, strict=True)
        return [RichText(text, style=self._style(row, column), no_wrap=True) for text, column in texts]

    def on_resize(self, event: Resize) -> None:
        self.show(self.jobs)

    @staticmethod
    def _style(row: JobRow, column: Column) -> str:
        if column.title == "STATE":
            return choose_colour(row.state)
        return "bold red" if column.title == "NOTE" and row.alarms else ""


class TopScreen(App[Exception]):
    """The table of jobs, and below it the chosen one. Ends with the error that ended it, if one did."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #headline { height: 1; background: $primary; color: $text; }
    #note { height: auto; max-height: 2; color: $error; display: none; }
    #table { height: 1fr; }
    #detail { height: auto; max-height: 40%; border-top: solid $primary; }
    #filter { display: none; height: 1; border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "logs", "Logs"),
        Binding("c", "cancel", "Cancel"),
        Binding("w", "why", "Why"),
        Binding("s", "shell", "Shell"),
        Binding("o", "sort", "Sort"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("enter,space", "fold", "Unfold", key_display="⏎", priority=False),
        Binding("r", "ask", "Refresh"),
        Binding("q,ctrl+c", "quit", "Quit", priority=False),
        Binding("escape", "clear", show=False),
    ]

    def __init__(
        self, looker: Looker, first: Snapshot, actions: Actions, *, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self.actions, self._clock = actions, clock
        self.view = View()
        self.updates = Refresh(self, looker, first, unfolded=lambda: self.view.unfolded, show=self.draw)
        self._message = ""
        self.ended_by: signal.Signals | None = None
        """The signal that ended it; the terminal is restored."""

    # --- drawing

    def compose(self) -> ComposeResult:
        yield PlainText(id="headline")
        yield PlainText(id="note")
        yield JobTable(id="table", clock=self._clock)
        with Vertical(id="detail"):
            yield PlainText(id="chosen")
        yield Input(placeholder="id, name, state, node or reason; Enter keeps the filter", id="filter", compact=True)
        yield Footer(compact=True)

    def on_mount(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        self._table.focus()
        self.updates.start()
        self.draw()

    def _end(self, number: signal.Signals) -> None:
        self.ended_by = number
        self.exit()

    def on_resize(self, event: Resize) -> None:
        self.draw(width=event.size.width)

    @property
    def _table(self) -> JobTable:
        return self.query_one("#table", JobTable)

    @property
    def chosen(self) -> JobRow | None:
        """The row that the cursor is on."""
        return self._table.chosen

    def draw(self, *, width: int | None = None) -> None:
        """Show the snapshot through the view, once the table exists."""
        if not self.query("#table"):
            return
        snapshot = self.updates.snapshot
        self._table.show(make_rows(snapshot, self.view))
        every_s, width = self.updates.every_s, width or self.size.width
        text = headline(snapshot, sort=self.view.sort, text=self.view.text, every_s=every_s, width=width)
        self.query_one("#headline", PlainText).show(text)
        note = self.query_one("#note", PlainText)
        lines = [line for line in (self._message, *(text.splitlines()[0] for text in snapshot.errors)) if line]
        note.show("\n".join(lines[:2]))
        note.display = bool(lines)
        self._describe_chosen()

    @on(DataTable.RowHighlighted)
    def _describe_chosen(self) -> None:
        row = self.chosen
        lines = [] if row is None else describe(row, self._clock(), self.size.width - 1)
        self.query_one("#chosen", PlainText).show("\n".join(lines))

    def show_message(self, message: str) -> None:
        """Show the first line of ``message`` above the table."""
        self._message = message.splitlines()[0] if message else ""
        self.draw()

    @on(ThreadCall)
    def _call(self, message: ThreadCall) -> None:
        message.call()

    # --- keys

    def action_ask(self) -> None:
        self._message = ""
        self.updates.ask_soon()

    def action_sort(self) -> None:
        following = SORTS[(SORTS.index(self.view.sort) + 1) % len(SORTS)]
        self.view = self.view._replace(sort=following)
        self.draw()

    def action_fold(self) -> None:
        row = self.chosen
        if row is None or not (row.folds or row.inside):
            return
        self.view = self.view._replace(unfolded=self.view.unfolded ^ {row.group.key})
        self.draw()
        self.updates.read()

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_clear(self) -> None:
        field = self.query_one("#filter", Input)
        field.value, field.display = "", False
        self.view, self._message = self.view._replace(text=""), ""
        self._table.focus()
        self.draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.view = self.view._replace(text=event.value)
        self.draw()

    def on_input_submitted(self) -> None:
        self.query_one("#filter", Input).display = False
        self._table.focus()

    def action_logs(self) -> None:
        if (row := self.chosen) is not None:
            title = f"log of {row.first.record.job_id} {row.group.name}, the last lines"
            self.push_screen(LineViewer(title, partial(self.actions.read_log, row), again_s=READ_S))

    def action_why(self) -> None:
        if (row := self.chosen) is not None:
            self.push_screen(LineViewer(f"why {row.job}", partial(self.actions.explain, row), again_s=None))

    def action_shell(self) -> None:
        if (row := self.chosen) is None:
            return
        try:
            argv = self.actions.shell(row)
        except HpcJobsError as error:
            self.show_message(str(error))
            return
        with self.suspend():
            run_in_terminal(argv)

    def action_cancel(self) -> None:
        row = self.chosen
        if row is None:
            return
        alive = sum(n for state, n in row.counts if not state.ended)
        if not alive:
            self.show_message(f"job {row.job} has ended")
            return
        what = f"{alive} tasks of {row.job}" if row.folds else f"job {row.job}"
        self.push_screen(Confirmation(f"Cancel {what} ({row.group.name})?"), partial(self._cancel, row))

    def _cancel(self, row: JobRow, sure: bool | None) -> None:
        if sure:
            self.run_worker(partial(self._cancel_in_thread, row), thread=True, group="cancel")

    def _cancel_in_thread(self, row: JobRow) -> None:
        try:
            message = self.actions.cancel(row)
        except HpcJobsError as error:
            message = str(error)
        self.post_message(ThreadCall(partial(self.show_message, message)))
        self.post_message(ThreadCall(self.updates.ask_soon))
