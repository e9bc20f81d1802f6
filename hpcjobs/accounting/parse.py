"""Parses sacct's output, block by block, into frames of text: one record per row, whatever characters names contain.

A block in which every line is one record goes to polars as it is, which is much faster. In any other the records are
told apart by `Table.split`. What is no record is counted and named, and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import polars as pl

from hpcjobs.accounting.doubts import Doubts
from hpcjobs.scheduler.slurm.table import CONTROL, SEPARATOR, Table

_SEPARATOR: Final = SEPARATOR.encode()
_CONTROL: Final = CONTROL.encode().replace(_SEPARATOR, b"")


def frames(blocks: Iterable[bytes], table: Table, doubts: Doubts) -> Iterator[pl.DataFrame]:
    """One frame of strings per block; null where sacct left a column empty."""
    rest = b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        lines, rest = data[:end], data[end:]
        frame = _frame_of_lines(lines, table)
        if frame is None and lines:
            split = table.split(lines.decode("utf-8", "replace"))
            if len(table.separator) == 1:
                doubts.add("put together from several lines", (_start(record, table) for record in split.merged))
            doubts.add("not the columns asked for", (_start(text, table) for text in split.refused))
            rest = split.rest.encode() + rest
            text = "".join(f"{record}\n" for record in split.records)
            frame = _frame(text.encode(), table) if text else None
        if frame is not None and len(frame):
            yield frame
    if rest.strip():
        doubts.add("truncated", [_start(rest.decode("utf-8", "replace"), table)])


def _frame_of_lines(lines: bytes, table: Table) -> pl.DataFrame | None:
    """The frame, if every line is one record: the sum of separators is right, and no line has too many."""
    separators = lines.count(table.separator.encode())
    if not lines or separators != lines.count(b"\n") * (len(table.columns) - 1):
        return None
    try:
        return _frame(lines, table)
    except pl.exceptions.ComputeError:
        return None


def _start(record: str, table: Table) -> str:
    """The start of a record, for people."""
    return record[:160].replace(table.separator, "|").strip().replace("\n", " ")


def _frame(lines: bytes, table: Table) -> pl.DataFrame:
    separator = table.separator.encode()
    if len(separator) > 1:  # polars splits at one character
        if lines.count(_SEPARATOR) != lines.count(separator):  # somebody's name holds the first character of it
            lines = lines.replace(separator, b"\0").replace(_SEPARATOR, b" ").replace(b"\0", _SEPARATOR)
        lines = lines.translate(None, delete=_CONTROL)
        separator = _SEPARATOR
    return pl.read_csv(
        lines,
        separator=separator.decode(),
        has_header=False,
        infer_schema=False,
        quote_char=None,
        new_columns=list(table.columns),
    )
