"""What verbs print: JSON for scripts, tables for people."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Jobs = Annotated[list[str], typer.Argument(help="Ids, ranges, run folders or names.")]
SiteName = Annotated[
    str | None,
    typer.Option("--site", "-s", help="Site name or file [HPCJOBS_SITE, user config, local].", show_default=False),
]


def print_json(value: object) -> None:
    """``value`` as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as its content on a pipe, folded to the terminal otherwise."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = os.environ.get("COLUMNS", "")
    width = (
        int(columns)
        if columns.isdecimal() and int(columns) > 0
        else (shutil.get_terminal_size().columns if sys.stdout.isatty() else 400)
    )
    table = Table(*headers, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(width=width, highlight=False, markup=False, emoji=False).print(table)


def cell(value: object) -> str:
    """A value as a cell of a table; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def clock(seconds: float | None) -> str:
    """A moment as local time, with the date when it is not today; ``-`` when unknown."""
    if seconds is None:
        return "-"
    then = time.localtime(seconds)
    today = time.strftime("%F", then) == time.strftime("%F")
    return time.strftime("%H:%M:%S" if today else "%F %H:%M", then)


def note(text: str) -> None:
    """A line for people, on standard error, so that standard output stays what was asked for."""
    print(f"hpcjobs: {text}", file=sys.stderr, flush=True)
