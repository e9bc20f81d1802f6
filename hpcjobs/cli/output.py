"""What verbs print: JSON for scripts, tables for people."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import typer

from hpcjobs.cli.completion import complete_jobs, complete_sites

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Jobs = Annotated[list[str], typer.Argument(help="Ids, ranges, run folders or names.", autocompletion=complete_jobs)]
SiteName = Annotated[
    str | None,
    typer.Option(
        "--site",
        "-s",
        help="Site name or file [HPCJOBS_SITE, user config, local].",
        show_default=False,
        autocompletion=complete_sites,
    ),
]
JobSite = Annotated[
    str | None,
    typer.Option("--site", "-s", help="Only jobs of this site: name or file [all sites].", show_default=False),
]


def print_json(value: object) -> None:
    """``value`` as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table_width() -> int:
    """How wide a table may be: as the terminal is, or as COLUMNS says; as its content on a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 400


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Sequence[Mapping[int, str]] | None = None
) -> None:
    """A table as wide as its content on a pipe, folded to the terminal otherwise.

    ``styles`` has the colour of cells by their column, for each row; only a terminal without NO_COLOR shows it.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headers, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, row in enumerate(rows):
        style = styles[number] if styles is not None else {}
        table.add_row(*(Text(text, style[n]) if n in style else text for n, text in enumerate(row)))
    Console(width=table_width(), highlight=False, markup=False, emoji=False).print(table)


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
