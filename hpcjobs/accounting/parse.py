"""sacct's output, block by block, as frames of text: one record per row, whatever names hold.

The separator of a question is a control character followed by others drawn for that question alone,
so that no job name can hold it; then records are told apart by counting separators, and newlines inside
a name stay inside it. Output recorded with a plain separator (``|``) is read too; what cannot be told
apart there is counted and named, and left out.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import polars as pl

_UNIT = b"\x1f"
_CONTROL = bytes(code for code in range(1, 31) if code not in b"\t\n\v\f\r")
_EXAMPLES = 20


def new_separator() -> str:
    """A separator that nobody can have put into a job name beforehand."""
    return _UNIT.decode() + "".join(chr(secrets.choice(_CONTROL)) for _ in range(3))


class Doubt(NamedTuple):
    """A kind of doubtful row: how many, and which (the first twenty)."""

    kind: str
    rows: int
    examples: tuple[str, ...]


class Doubts:
    """Collects rows that were left out or only partly believed."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, kind: str, rows: Iterable[str]) -> None:
        """Count ``rows`` under ``kind``."""
        for row in rows:
            self._counts[kind] += 1
            kept = self._examples.setdefault(kind, [])
            if len(kept) < _EXAMPLES and row not in kept:
                kept.append(row)

    def told(self) -> list[Doubt]:
        """Every kind met, the most frequent first."""
        return [Doubt(kind, count, tuple(self._examples[kind])) for kind, count in self._counts.most_common()]


def frames(
    blocks: Iterable[bytes], columns: Sequence[str], *, separator: str, doubts: Doubts
) -> Iterator[pl.DataFrame]:
    """One frame of strings per block; null where sacct left a column empty."""
    mark = separator.encode()
    rest = b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        whole, rest = data[:end], data[end:]
        frame = _if_regular(whole, mark, columns)
        if frame is None:
            whole, open_record = _mended(whole, mark, len(columns), doubts)
            rest = open_record + rest
            whole = whole.decode("utf-8", "replace").encode()
            frame = _frame(whole, mark, columns, marks=whole.count(mark)) if whole else None
        if frame is not None and len(frame):
            yield frame
    if rest.strip():
        doubts.add("truncated", [_shown(rest, mark)])


def _if_regular(data: bytes, mark: bytes, columns: Sequence[str]) -> pl.DataFrame | None:
    """The frame, if every line is one record: the sum of separators is right, and no line has too many."""
    marks = data.count(mark)
    if not data or marks != data.count(b"\n") * (len(columns) - 1):
        return None
    try:
        return _frame(data, mark, columns, marks=marks)
    except pl.exceptions.ComputeError:
        return None


def _mended(data: bytes, mark: bytes, width: int, doubts: Doubts) -> tuple[bytes, bytes]:
    """Records put together again from their lines, and the beginning of one whose end is yet to come."""
    good: list[bytes] = []
    held: list[bytes] = []
    for line in data.split(b"\n")[:-1]:
        if not line and not held:
            continue
        held.append(line)
        found = sum(part.count(mark) for part in held)
        if found < width - 1:
            continue
        if found == width - 1:
            good.append(b" ".join(held))
            if len(held) > 1 and len(mark) == 1:
                doubts.add("put together from several lines", [_shown(good[-1], mark)])
        else:
            whole = line.count(mark) == width - 1
            broken = held[:-1] if whole else held
            doubts.add("not the columns asked for", [_shown(b" ".join(broken), mark)])
            good += [line] if whole else []
        held = []
    text = b"".join(record + b"\n" for record in good)
    return text, b"".join(part + b"\n" for part in held)


def _shown(record: bytes, mark: bytes) -> str:
    """The start of a record, for people."""
    return record[:160].replace(mark, b"|").decode("utf-8", "replace").strip().replace("\n", " ")


def _frame(data: bytes, mark: bytes, columns: Sequence[str], *, marks: int) -> pl.DataFrame:
    """``marks``: how many separators there are."""
    if len(mark) > 1:
        if data.count(_UNIT) != marks:  # somebody's name holds the first character of it
            data = data.replace(mark, b"\0").replace(_UNIT, b" ").replace(b"\0", _UNIT)
        data = data.translate(None, delete=_CONTROL)
        mark = _UNIT
    return pl.read_csv(
        data, separator=mark.decode(), has_header=False, infer_schema=False, quote_char=None, new_columns=list(columns)
    )
