"""Shared parts of reports: HTML pages that need no other file and no network; the style of figures (`figures`)."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jinja2

from hpcjobs import __version__
from hpcjobs.files import file_name, make_folder, require_unplanted, write_beside

if TYPE_CHECKING:
    import polars as pl


def page_folder(name: str, kind: str) -> Path:
    """``NAME-KIND`` in the current folder; the name may be from a file of somebody else, and leads nowhere."""
    return Path(f"{file_name(name)}-{kind}")


def make_page_folder(folder: Path) -> None:
    """Make the folder of a page. Raises OSError: another user has put a link or a folder there beforehand."""
    require_unplanted(folder)
    make_folder(folder, 0o777)


_STREAM_FOLDERS = (Path("/dev"), Path("/dev/fd"))
"""Not /dev/shm, where everybody may write."""


def save_file(path: Path, content: bytes | str) -> None:
    """Write a file of a page in one step: a link of its name is replaced, not followed, but for /dev/stdout."""
    if path.parent in _STREAM_FOLDERS:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        write_beside(path, content, mode=None, durable=False)


def save_parquet(path: Path, frame: pl.DataFrame) -> None:
    """Write a table as Parquet, through a buffer: errors of polars have neither an error number nor a file name."""
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    save_file(path, buffer.getvalue())


class PageTable(NamedTuple):
    """A table; columns of numbers are aligned right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str | None = None

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds only numbers and empty cells."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headers)
        return [bool(column) and all(map(_is_number, column)) for column in columns]


class Picture(NamedTuple):
    """A figure with its caption (quantity, unit, interval, source) and a table of its numbers."""

    title: str
    caption: str
    svg: str
    table: PageTable | None = None


class Section(NamedTuple):
    """A part of a page, from top to bottom: sentences, pictures, a table."""

    title: str
    lines: Sequence[str] = ()
    table: PageTable | None = None
    pictures: Sequence[Picture] = ()


def render(
    *, title: str, lead: str, facts: Mapping[str, str | None], sections: Sequence[Section], warnings: Sequence[str] = ()
) -> str:
    """A page; the content is escaped.

    Args:
        facts: site, partition, node model, period and source, which a comparison needs. None: not known.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    written = time.strftime("%Y-%m-%d %H:%M %Z")
    known = {name: value for name, value in facts.items() if value} | {"written": f"{written} by hpcjobs {__version__}"}
    return environment.get_template("page.html.j2").render(
        title=title, lead=lead, facts=known, sections=sections, warnings=warnings
    )


def _is_number(text: str) -> bool:
    first = (text.split() or [""])[0].lstrip("~<+").rstrip("%,").replace(",", "")
    return (
        text in ("", "-", "–")
        or first.replace(".", "", 1).replace("e", "", 1).lstrip("-+").isdigit()
        or (first[:1].isdigit() and first[-1:] in "dhmsBKMGT" and first.rstrip("dhmsBKMGT").replace(".", "").isalnum())
    )
