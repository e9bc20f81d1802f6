"""A copy of the code beside the job, so that edits made while it queues do not reach it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpcjobs.errors import CommandMissingError, RequestError
from hpcjobs.processes.programs import run
from hpcjobs.units import human_bytes

LARGEST = 512 << 20
_NOT_CODE = frozenset(
    (".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules")
)


def copy_code(source: Path, target: Path, *, leave_out: Path) -> None:
    """Copy ``source`` to ``target``: what git tracks or would track, or all but the usual caches outside git.

    Raises:
        RequestError: over 512 MiB; data does not belong in a snapshot.
    """
    if _is_snapshot(source):  # it has been chosen already, and git ignores run folders
        files = list(_walk(source))
    else:
        files = [path for path in _code_files(source) if not (source / path).is_relative_to(leave_out)]
    size = sum((source / path).lstat().st_size for path in files)
    if size > LARGEST:
        raise RequestError(
            f"--snapshot: {source} holds {human_bytes(size)}, the limit is {human_bytes(LARGEST)}",
            hint="leave data out with .gitignore, or start from the folder that holds the code",
        )
    target.mkdir(mode=0o700)
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target / path, follow_symlinks=False)


def _is_snapshot(source: Path) -> bool:
    """Whether this is the copy of the code in a run folder."""
    return source.name == "code" and (source.parent / "manifest.json").is_file()


def _code_files(source: Path) -> list[Path]:
    """Files below ``source``, relative to it."""
    try:
        listed = run(["git", "-C", str(source), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    except CommandMissingError:
        return list(_walk(source))
    if listed.code != 0:
        return list(_walk(source))
    names = (Path(name) for name in listed.out.split("\0") if name)
    return [name for name in names if (source / name).is_file() or (source / name).is_symlink()]


def _walk(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in _NOT_CODE]
        for name in names:
            yield (Path(folder) / name).relative_to(source)
