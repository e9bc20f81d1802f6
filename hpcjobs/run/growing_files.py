"""Reads files that grow and may be huge: a log from its end or block by block, and lines of JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from hpcjobs.files import open_regular

_BLOCK = 1 << 16
_LONGEST_BYTES = 1 << 22
"""A longer line is given out in pieces: a progress bar may write gigabytes without the end of a line."""
_FIRST_OF_SEVERAL = 0xC0
"""Bytes from here on begin a character of several bytes in UTF-8."""
_TIME = re.compile(
    rb"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,]\d+)?(?P<zone>Z|[+-]\d\d:?\d\d)?(?!\d)"
)
_TIME_BYTES = 120
"""A time that stands later in a line is not the moment the line was printed."""


class Tail:
    """A file that grows, or is not there yet. It is open only while it is read: an array has many."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path, self._read_bytes = path, start
        self._seen_bytes = start
        """The file's size at the last look, when the incomplete last line was read."""
        self._is_within_line = False
        """Whether a piece of an incomplete line was returned."""

    def news(self, *, last: bool) -> Iterator[str]:
        """New lines, read block by block; with ``last``, an incomplete last line too.

        Pieces of a line that is too long to hold have no newline at their end, except the last one.
        """
        try:
            size = self._path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return
        if size < self._read_bytes:  # the file was replaced
            self._read_bytes, self._is_within_line = 0, False
        if size == self._seen_bytes and not last:
            return
        begun: list[bytes] = []  # pieces of an incomplete line
        if size > self._read_bytes:
            with open_regular(self._path) as file:
                file.seek(self._read_bytes)
                while block := file.read(_BLOCK):
                    *ends, rest = block.split(b"\n")
                    for end in ends:
                        line, begun = b"".join([*begun, end]), []
                        self._read_bytes += len(line) + 1
                        self._is_within_line = False
                        yield line.decode("utf-8", "replace") + "\n"
                    begun.append(rest)
                    if sum(map(len, begun)) >= _LONGEST_BYTES:
                        piece = b"".join(begun)
                        end_of_piece = len(piece) - next((n for n in (1, 2, 3) if piece[-n] >= _FIRST_OF_SEVERAL), 0)
                        begun = [piece[end_of_piece:]]  # a character of several bytes stays together
                        self._read_bytes += end_of_piece
                        self._is_within_line = True
                        yield piece[:end_of_piece].decode("utf-8", "replace")
        self._seen_bytes = size
        if last and (any(begun) or self._is_within_line):
            line = b"".join(begun)
            self._read_bytes += len(line)
            self._is_within_line = False
            yield line.decode("utf-8", "replace") + "\n"


def find_start(
    path: Path, *, count: int | None = None, since: float | None = None, accepts: Callable[[str], bool]
) -> int:
    """The offset of the last ``count`` lines that ``accepts`` takes, behind the last line that is older than ``since``.

    The file is read from its end, only as far as needed.

    Raises:
        ValueError: no line of the file has a time to compare with ``since``.
        OSError: the file cannot be read.
    """
    start, accepted, is_dated = path.stat().st_size, 0, False
    if count == 0 or (since is not None and path.stat().st_mtime < since):
        return start
    above = start
    for offset, line in _lines_from_end(path):
        if since is not None and (moment := line_time(line)) is not None:
            is_dated = True
            if moment < since:
                return above if count is None else start
        above = offset
        if count is not None and accepts(line.decode("utf-8", "replace")):
            start, accepted = offset, accepted + 1
            if accepted == count:
                return start
    if since is not None and not is_dated and path.stat().st_size:
        raise ValueError(f"no line of {path} has a date and a time")
    return 0 if count is None else start


def line_time(line: bytes) -> float | None:
    """The moment that a line begins with, in seconds since 1970; local time where no zone stands. None: none."""
    match = _TIME.search(line[:_TIME_BYTES])
    if match is None:
        return None
    numbers = [int(part) for part in match.groups()[:6]]
    zone = (match["zone"] or b"").decode()
    try:
        if not zone:
            return datetime(*numbers).timestamp()  # type: ignore[arg-type]  # six numbers
        text = "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}".format(*numbers)
        offset = "+0000" if zone == "Z" else zone.replace(":", "")
        return datetime.strptime(text + offset, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):  # the 31st of February, or the year 0
        return None


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its offset, the last one first; one block and one line, or a piece of it, are in memory."""
    with open_regular(path) as file:
        position = file.seek(0, os.SEEK_END)
        if not position:
            return
        rest: list[bytes] = []  # pieces of an incomplete line, the last piece first
        ends_line = True
        while position:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            end = len(block)
            if ends_line and block.endswith(b"\n"):
                end -= 1
            ends_line = False
            while (newline := block.rfind(b"\n", 0, end)) >= 0:
                yield position + newline + 1, block[newline + 1 : end] + b"".join(reversed(rest))
                rest, end = [], newline
            rest.append(block[:end])
            if sum(map(len, rest)) >= _LONGEST_BYTES:
                yield position, b"".join(reversed(rest))
                rest = []
        if rest:
            yield 0, b"".join(reversed(rest))


_END_BYTES = 1 << 16


def first_line(path: Path) -> bytes:
    """The first line of a file; empty where it is not there."""
    try:
        with open_regular(path) as file:
            return file.readline(_END_BYTES)
    except OSError:  # removed in the meantime
        return b""


def last_lines(path: Path) -> list[bytes]:
    """The lines of the last 64 KiB; the first of them may be the end of one."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            return file.read().splitlines()
    except OSError:  # not there yet
        return []
