"""Prints the output of verbs: JSON for scripts, tables for people."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import typer

from hpcjobs.cli.completion import complete_jobs, complete_sites
from hpcjobs.cli.terminal import json_state, note_json
from hpcjobs.printable import escape_json, printable

Json = Annotated[bool, typer.Option("--json", callback=note_json, is_eager=True, help="Print JSON.")]
OneJob = Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)]
JobOrNewest = Annotated[
    str | None, typer.Argument(help="Id, array task, run folder or name [newest].", autocompletion=complete_jobs)
]
Jobs = Annotated[list[str], typer.Argument(help="Ids, ranges, run folders or names.", autocompletion=complete_jobs)]


def _refuse_empty(value: str | None) -> str | None:
    """Refuse an empty name: it comes from an unset variable, and does not mean the default."""
    if value == "":
        raise typer.BadParameter("the name is empty; leave the option out for the default")
    return value


def opt(*names: str, help: str, **settings: Any) -> Any:
    """An option that is None, or off, unless it is given; its help has the default in brackets."""
    return typer.Option(*names, help=help, show_default=False, **settings)


def _site_option(text: str) -> Any:
    return opt("--site", "-s", callback=_refuse_empty, help=text, autocompletion=complete_sites)


SiteName = Annotated[
    str | None,
    _site_option("Site: name or file [HPCJOBS_SITE, project file, user config, this cluster, else local]."),
]
AnySite = Annotated[str | None, _site_option("Only this site: name or file [my sites and the centre's].")]
JobSite = Annotated[str | None, _site_option("Only jobs of this site: name or file [all sites].")]
SpecFile = Annotated[
    Path | None, opt("--spec", help="YAML file with values of these options; options given here override it.")
]
Partition = Annotated[str | None, opt("--partition", "-p", help="Partition [the site's default].")]
Option = Annotated[list[str] | None, opt("-o", help="Any other sbatch option: -o exclusive.")]
DryRun = Annotated[bool, opt("--dry-run", help="Print what would be submitted; write nothing.")]


def print_output(verb: str, value: object) -> None:
    """Print ``value`` as ``hpcjobs VERB --json`` does: by the type that `json_types` has for it."""
    from hpcjobs.cli.json_output import print_as

    print_as(verb, value)


def print_json(value: object) -> None:
    """``value`` as indented JSON; bytes that are not UTF-8, as of a path, are ``?``."""
    try:
        document = msgspec.json.encode(value)
    except UnicodeEncodeError:
        document = msgspec.json.encode(_replace_bytes(msgspec.to_builtins(value)))
    json_state.is_printed = True
    sys.stdout.write(escape_json(msgspec.json.format(document, indent=2).decode()) + "\n")


def _replace_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {_replace_bytes(key): _replace_bytes(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_replace_bytes(one) for one in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


_UNLIMITED = 1_000_000
_GAP = 3
"""Characters between two columns."""
_FOLDED = 24
"""Texts longer than this are folded where the terminal is too narrow for them."""
_SHORTEST_LINE = 20


def shows_colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal and the user allows colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def table_width() -> int:
    """The width that a table may have: the terminal's, or its content's on a pipe, whatever COLUMNS says."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


def print_table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], *, styles: Sequence[Mapping[int, str]] | None = None
) -> None:
    """A table as wide as its content; where the terminal is narrower, long texts are folded.

    Where folding is not enough, each row is a list of its values, below each other. ``styles`` has the colour of cells
    by their column, for each row; only a terminal without NO_COLOR shows it.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = [["\n".join(map(printable, text.split("\n"))) for text in row] for row in rows]
    width = table_width()
    widths = [max(cell_len(line) for text in column for line in (text.splitlines() or [""]))
              for column in zip(headers, *lines, strict=True)]  # fmt: skip
    gaps = _GAP * (len(headers) - 1)
    if sum(min(_FOLDED, one) for one in widths) + gaps > width:
        _print_records(headers, lines, width)
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="", pad_edge=False, show_edge=False)
    for header, one in zip(headers, widths, strict=True):
        table.add_column(header, min_width=min(one, _FOLDED), no_wrap=one <= _FOLDED, overflow="fold")
    for number, line in enumerate(lines):
        style = styles[number] if styles is not None else {}
        table.add_row(*(Text(text, style[n]) if n in style else text for n, text in enumerate(line)))
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as printed:
        console.print(table)
    for line_of_table in printed.get().splitlines():
        print(line_of_table.rstrip())


def _print_records(headers: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> None:
    """Each row as lines of a column's name and its value; empty values are left out."""
    indent = max(map(len, headers)) + 2
    room = max(_SHORTEST_LINE, width - indent)
    for row in rows:
        for header, value in zip(headers, row, strict=True):
            if value not in ("", "-"):
                first, *more = textwrap.wrap(value, room, break_on_hyphens=False) or [""]
                print(f"{header:<{indent}}{first}", *(" " * indent + line for line in more), sep="\n")
        print()


def note(text: str) -> None:
    """A line for people, on standard error, so that standard output has only the result."""
    text = "\n".join(map(printable, text.split("\n")))  # rich prints it where bars are drawn
    print(f"hpcjobs: {text}", file=sys.stderr, flush=True)
