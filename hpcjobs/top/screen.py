"""The screen of ``hpcjobs top``, drawn with textual: it shows what `rows` and `text` give, and calls `actions`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.widgets import Footer, Input

from hpcjobs.errors import HpcJobsError
from hpcjobs.processes.programs import run_in_terminal
from hpcjobs.top.actions import Actions
from hpcjobs.top.dialogs import Confirmation, LineViewer
from hpcjobs.top.look import Looker
from hpcjobs.top.plain_text import PlainText
from hpcjobs.top.refresh import READ_S, Refresh
from hpcjobs.top.rows import SORTS, JobRow, View, make_rows
from hpcjobs.top.snapshot import Snapshot
from hpcjobs.top.table import JobTable
from hpcjobs.top.text import describe, headline
from hpcjobs.top.thread_call import ThreadCall


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
        """The signal that ended it; the terminal is as it was before."""

    # --- what is shown

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
        """Show the snapshot as the view has it; nothing before the table is there, or when it is no more."""
        if not self.query("#table"):
            return
        snapshot = self.updates.snapshot
        self._table.show(make_rows(snapshot, self.view))
        text = headline(
            snapshot,
            sort=self.view.sort,
            text=self.view.text,
            every_s=self.updates.every_s,
            width=width or self.size.width,
        )
        self.query_one("#headline", PlainText).show(text)
        note = self.query_one("#note", PlainText)
        lines = [line for line in (self._message, *(text.splitlines()[0] for text in snapshot.errors)) if line]
        note.show("\n".join(lines[:2]))
        note.display = bool(lines)
        self._describe_chosen()

    @on(JobTable.Chosen)
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
