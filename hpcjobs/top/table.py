"""The table of jobs. Only the lines that are visible are made into text, so a thousand rows cost what fifty do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hpcjobs.scheduler.state_colours import choose_colour
from hpcjobs.top.rows import JobRow
from hpcjobs.top.text import Column, cells, choose_columns, titles

_TITLES = 1
"""Lines above the first row."""
_SCROLLBAR = 2


class JobTable(ScrollView, can_focus=True):
    """Rows below the titles of their columns, with a cursor on one of them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "move_page(-1)", show=False),
        Binding("pagedown", "move_page(1)", show=False),
        Binding("home", "move_to(0)", show=False),
        Binding("end", "move_to(-1)", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--titles", "table--cursor"}
    DEFAULT_CSS = """
    JobTable { background: $surface; color: $foreground; overflow-x: hidden; }
    JobTable > .table--titles { background: $panel; color: $foreground; text-style: bold; }
    JobTable > .table--cursor { background: $block-cursor-background; color: $block-cursor-foreground; }
    """

    class Chosen(Message):
        """The cursor is on another row."""

    def __init__(self, *, id: str, clock: Callable[[], float] = time.time) -> None:
        super().__init__(id=id)
        self._clock = clock
        self.rows: Sequence[JobRow] = ()
        self._cursor = 0
        self._columns: list[Column] = []

    @property
    def chosen(self) -> JobRow | None:
        """The row that the cursor is on."""
        return self.rows[self._cursor] if self._cursor < len(self.rows) else None

    def show(self, rows: Sequence[JobRow]) -> None:
        """Show these rows; the cursor stays on its row wherever that is now, else where it is."""
        before = self.chosen
        self.rows = rows
        self._choose_columns()
        self.virtual_size = Size(self._width, len(rows) + _TITLES)
        here = range(len(rows)) if before is None else [n for n, row in enumerate(rows) if row.key == before.key]
        self._place(here[0] if len(here) and before is not None else self._cursor)
        self.refresh()

    def on_resize(self, event: Resize) -> None:
        self._choose_columns()
        self._place(self._cursor)

    def _choose_columns(self) -> None:
        self._columns = choose_columns(self._width, self.rows, self._clock())

    def on_click(self, event: Click) -> None:
        number = self.scroll_offset.y + event.y - _TITLES
        if event.y >= _TITLES and number < len(self.rows):
            self._place(number)

    def action_move(self, rows: int) -> None:
        self._place(self._cursor + rows)

    def action_move_page(self, pages: int) -> None:
        self._place(self._cursor + pages * max(1, self._lines - 1))

    def action_move_to(self, row: int) -> None:
        self._place(row if row >= 0 else len(self.rows) + row)

    def render_line(self, y: int) -> Strip:
        """The titles, or the row on line ``y`` of what is visible."""
        if y < _TITLES:
            return self._strip([Segment(f"{text} ") for text in titles(self._columns)], "table--titles")
        number = y - _TITLES + self.scroll_offset.y
        if number >= len(self.rows):
            return Strip.blank(self.size.width, self.rich_style)
        row = self.rows[number]
        texts = zip(cells(row, self._columns, self._clock()), self._columns, strict=True)
        segments = [Segment(set_cell_size(text, c.width + 1), self._style(row, c)) for text, c in texts]
        return self._strip(segments, "table--cursor" if number == self._cursor else None)

    def _strip(self, segments: list[Segment], component: str | None) -> Strip:
        style = self.rich_style if component is None else self.get_component_rich_style(component)
        return Strip(segments).adjust_cell_length(self.size.width).apply_style(style)

    @staticmethod
    def _style(row: JobRow, column: Column) -> Style | None:
        if column.title == "STATE":
            return Style.parse(choose_colour(row.state))
        return Style.parse("bold red") if column.title == "NOTE" and row.alarms else None

    def _place(self, cursor: int) -> None:
        """Put the cursor there, or as near as there are rows, and scroll until it is visible."""
        self._cursor = max(0, min(cursor, len(self.rows) - 1))
        top = self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + self._lines > 0:
            self.scroll_to(y=self._cursor - self._lines + 1, animate=False)
        self.refresh()
        self.post_message(self.Chosen())

    @property
    def _lines(self) -> int:
        """How many rows are visible."""
        return self.size.height - _TITLES

    @property
    def _width(self) -> int:
        return self.outer_size.width - _SCROLLBAR
