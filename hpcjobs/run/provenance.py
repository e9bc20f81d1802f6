"""Reads which code a job runs: its git commit, and what differs from it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import CommandMissingError, HpcJobsWarning
from hpcjobs.processes.programs import Runner, run
from hpcjobs.run.git import read_difference, read_status

_LARGEST_PATCH = 20 << 20


class CodeState(NamedTuple):
    """The git state of a folder."""

    commit: str | None
    """None in a repository without a commit."""
    dirty: bool
    """Tracked files differ from the commit."""
    untracked: list[str]
    patch: str
    """``git diff HEAD --binary``; empty when clean or over 20 MiB."""
    missing: str | None = None
    """What `patch` lacks of the changes, and why."""


def code_state(folder: Path, *, runner: Runner = run) -> CodeState | None:
    """The state of the repository ``folder`` is in; None outside one or without git.

    Two git processes for a clean tree, four for a changed one.
    """
    try:
        status = read_status(folder, runner=runner)
    except CommandMissingError:
        return None
    if "dubious ownership" in status.err:
        warnings.warn(
            f"no commit and no code.patch of {folder} are kept: another user owns the repository"
            " (git config --global --add safe.directory FOLDER lets git read it)",
            HpcJobsWarning,
            stacklevel=2,
        )
    if status.code != 0:
        return None
    entries = status.out.split("\0")
    commit = next((e.removeprefix("# branch.oid ") for e in entries if e.startswith("# branch.oid ")), "(initial)")
    untracked = [_printable(entry[2:]) for entry in entries if entry.startswith("? ")]
    dirty = any(entry[:2] in ("1 ", "2 ", "u ") for entry in entries)
    known = None if commit == "(initial)" else commit
    patch = read_difference(folder, runner=runner) if dirty and known else ""
    missing = _say_missing(folder, patch)
    return CodeState(known, dirty, untracked, patch if len(patch) <= _LARGEST_PATCH else "", missing)


def _say_missing(folder: Path, patch: str) -> str | None:
    if len(patch) > _LARGEST_PATCH:
        return f"the changes since the commit, which are {len(patch) >> 20} MiB, more than {_LARGEST_PATCH >> 20} MiB"
    top = next((each for each in (folder, *folder.parents) if os.path.exists(each / ".git")), folder)
    return "changes within submodules" if os.path.exists(top / ".gitmodules") else None


def _printable(name: str) -> str:
    r"""A file's name as text: bytes that are no UTF-8, and control characters, as ``\xff``."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
