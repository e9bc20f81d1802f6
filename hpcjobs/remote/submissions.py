"""Records commands that got no answer, so that the same command typed again is sent with the same token.

The login host remembers which job it submitted for a token (`hpcjobs.run.submission`), so that a command which is sent
twice submits once.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcjobs.files import state_dir, write_beside


class Unanswered(msgspec.Struct, frozen=True):
    """A command that was sent."""

    token: str
    sent: float
    """Seconds since 1970."""


def find_or_record(destination: str, arguments: Sequence[str]) -> tuple[Unanswered, bool]:
    """The same command of the same folder that got no answer, and whether there was one; recorded as new if not."""
    path = _path(destination, arguments)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Unanswered), True
    except FileNotFoundError:
        pass
    except msgspec.MsgspecError:  # cut short by a full disk
        path.unlink()
    sent = Unanswered(secrets.token_hex(16), time.time())
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_beside(path, msgspec.json.encode(sent))
    return sent, False


def mark_answered(destination: str, arguments: Sequence[str]) -> None:
    """Forget the command: the next of its kind is a new one."""
    _path(destination, arguments).unlink(missing_ok=True)


def _path(destination: str, arguments: Sequence[str]) -> Path:
    key = "\0".join((destination, os.getcwd(), *arguments))
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    return state_dir() / "remote" / "unanswered" / f"{digest[:32]}.json"
