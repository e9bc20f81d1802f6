"""Reads tables that sacct, squeue and sstat print, by the names of columns.

``slurm_commands.list_queue(*table)`` and ``list_accounted(*table)`` request a table. ``table.rows(out)`` gives a
`TableRow` per job: ``row.count("NNodes")``, ``row.time("Submit")``. ``table.split(rest + block)`` gives the records of
an answer that is too large to hold, block by block. `fields` reads single values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.slurm import fields

SEPARATOR: Final = "\x1f"
CONTROL: Final = "".join(chr(code) for code in range(1, 31) if chr(code) not in "\t\n\v\f\r")
_JOB_ID = re.compile(r"\s*\d")


def new_separator() -> str:
    """A random separator, which no job name can contain on purpose: for rows of other users' jobs."""
    return SEPARATOR + "".join(CONTROL[byte % len(CONTROL)] for byte in os.urandom(3))


class TableRow:
    """One row of a table, or one record of scontrol: values by the name of their column. None: no such value."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def __contains__(self, column: str) -> bool:
        return column in self._values

    def raw(self, column: str) -> str:
        """The value as printed; empty if missing."""
        return self._values.get(column, "")

    def text(self, column: str) -> str | None:
        return fields.read_text(self.raw(column))

    def name(self, column: str) -> str | None:
        """A name that a user chose."""
        return fields.read_name(self.raw(column))

    def count(self, column: str) -> int | None:
        return fields.read_count(self.raw(column))

    def time(self, column: str) -> float | None:
        """Seconds since 1970."""
        return fields.read_time(self.raw(column))

    def clock_s(self, column: str) -> float | None:
        """Seconds of a duration such as ``1-02:03:04``."""
        return fields.read_clock_s(self.raw(column))

    def exit(self, column: str = "ExitCode") -> tuple[int | None, int | None]:
        """Exit code and signal."""
        return fields.read_exit(self.raw(column))

    def state(self, column: str = "State") -> State:
        return State.parse(self.raw(column))


class Split(NamedTuple):
    """An answer, or a block of one, as records of one line each."""

    records: list[str]
    merged: list[str]
    """Those of the records that were several lines: a name holds a newline."""
    refused: list[str]
    """Other lines, for example banners and lines cut off."""
    rest: str
    """The incomplete record at the end of the block; the next block continues it."""


class Table(NamedTuple):
    """Columns by sacct's names, JobID first, and the separator of their values."""

    columns: tuple[str, ...]
    separator: str = SEPARATOR

    def rows(self, out: str) -> Iterator[TableRow]:
        """The rows of a complete answer; other lines are left out."""
        for record in self.split(out if out.endswith("\n") else f"{out}\n").records:
            values = (value.strip() for value in record.split(self.separator))
            yield TableRow(dict(zip(self.columns, values, strict=True)))

    def split(self, block: str) -> Split:
        """The records of ``block``, told apart by counting separators, since names may hold newlines.

        A line that is a complete record ends an incomplete record before it, which was cut off.
        """
        records: list[str] = []
        merged: list[str] = []
        refused: list[str] = []
        held: list[str] = []
        separators = 0
        *lines, rest = block.split("\n")
        for line in lines:
            begins, here = _JOB_ID.match(line) is not None, line.count(self.separator)
            if held and begins and here == len(self.columns) - 1:
                refused.append(" ".join(held))
                held, separators = [], 0
            if not held and not begins:
                refused += [line] if line.strip() else []
                continue
            held.append(line)
            separators += here
            if separators < len(self.columns) - 1:
                continue
            if separators == len(self.columns) - 1:
                records.append(" ".join(held))
                merged += records[-1:] if len(held) > 1 else []
            else:
                refused.append(" ".join(held))
            held, separators = [], 0
        return Split(records, merged, refused, "".join(f"{line}\n" for line in held) + rest)
