"""Makes text of others printable: the one way to print names of jobs, reasons, logs and messages of programs.

Such text comes from whoever wrote it. Control characters (C0, C1), marks that change the direction of text, and
invisible characters are replaced; colours stay, on a terminal.
"""

from __future__ import annotations

import re

_COMMANDS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f"
)
_NO_BYTE = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
_COMMAND = re.compile(f"[{_COMMANDS}]")
_COMMAND_BUT_COLOUR = re.compile(rf"(\x1b\[(?!(?:\d+;)*8[;m])[0-9;]*m)|[{_COMMANDS}]")  # 8 hides text


def printable(text: str, *, colours: bool = False) -> str:
    """``text`` without characters and codes that a terminal would obey; with ``colours``, colour codes stay."""
    text = _join_bytes(text)
    if not colours:
        return _COMMAND.sub("?", text)
    return _COMMAND_BUT_COLOUR.sub(lambda match: match[1] or "?", text)


def _join_bytes(text: str) -> str:
    """``text`` with its single bytes as characters, where together they are some: a terminal joins them."""
    if text.isascii():
        return text
    return _NO_BYTE.sub("?", text).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def printable_line(text: str) -> str:
    """``text`` as one line: text after a line break cannot pass as a line of hpcjobs."""
    return printable(re.sub(r"[\t\n\v\f\r\x85\u2028\u2029]+", " ", text))


def printable_document(text: str) -> str:
    """``text`` with its colours and carriage returns, which progress bars use."""
    return "\r".join(printable(part, colours=True) for part in text.split("\r"))


def escape_json(text: str) -> str:
    """JSON with the same value, with characters that a terminal would obey escaped."""
    return re.sub(rf"(?!\n)[{_COMMANDS}]", _escape, text)


def _escape(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
