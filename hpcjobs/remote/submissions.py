"""Records commands that got no answer, so that the same command typed again is sent with the same token.

The login host remembers which job it submitted for a token (`hpcjobs.run.submission`), so that a command which is sent
twice submits once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Sequence

import msgspec

from hpcjobs.files import AppendStore


class Unanswered(msgspec.Struct, frozen=True):
    """A command that was sent."""

    token: str
    sent: float
    """Seconds since 1970."""


class _SubmissionLine(Unanswered, frozen=True, kw_only=True):
    """A line of the record: a command was sent, or answered."""

    command: str
    """Digest of host, folder and arguments."""
    answered: bool = False


def find_or_record(destination: str, arguments: Sequence[str]) -> tuple[Unanswered, bool]:
    """The unanswered command with this folder and ``arguments``, and True; or a new record, and False."""
    newest = _newest(destination, arguments)
    if newest is not None and not newest.answered:
        return Unanswered(newest.token, newest.sent), True
    sent = Unanswered(secrets.token_hex(16), time.time())
    _append(_SubmissionLine(sent.token, sent.sent, command=_digest(destination, arguments)))
    return sent, False


def mark_answered(destination: str, arguments: Sequence[str]) -> None:
    """Record the answer: the same command typed again is a new one."""
    newest = _newest(destination, arguments)
    if newest is not None and not newest.answered:
        _append(msgspec.structs.replace(newest, answered=True))


def _newest(destination: str, arguments: Sequence[str]) -> _SubmissionLine | None:
    """The last line about the command; lines that a full disk cut short are left out."""
    digest, newest = _digest(destination, arguments), None
    for stored in _store().read(_raise):
        if digest.encode() in stored.text:
            with contextlib.suppress(msgspec.MsgspecError):
                newest = msgspec.json.decode(stored.text, type=_SubmissionLine)
    return newest


def _append(line: _SubmissionLine) -> None:
    _store().append([msgspec.json.encode(line).decode()])


def _store() -> AppendStore:
    return AppendStore("remote", "sent")


def _raise(error: OSError) -> None:
    raise error


def _digest(destination: str, arguments: Sequence[str]) -> str:
    key = "\0".join((destination, os.getcwd(), *arguments))
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
