"""Dialogs that cover the table: lines to read, and a yes-or-no question."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer

from hpcjobs.errors import HpcJobsError
from hpcjobs.printable import printable_line
from hpcjobs.top.plain_text import PlainText
from hpcjobs.top.thread_call import ThreadCall


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
