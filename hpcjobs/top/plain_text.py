"""Text on the screen, whoever wrote it."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from hpcjobs.printable import printable, printable_document


class PlainText(Static):
    """Lines that the terminal shows and does not obey."""

    def __init__(self, text: str = "", *, id: str) -> None:
        super().__init__(printable(text), id=id, markup=False)

    def show(self, text: str) -> None:
        """Show ``text`` instead of what was there."""
        self.update(printable(text))

    def show_document(self, text: str) -> None:
        """Show a log or an explanation, with its colours."""
        self.update(Text.from_ansi(printable_document(text)))
