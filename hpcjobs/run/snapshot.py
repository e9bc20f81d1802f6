"""A copy of the code beside the job, so that edits made while it queues do not reach it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpcjobs.errors import CommandMissingError, RequestError
from hpcjobs.record.names import MANIFEST
from hpcjobs.run.git import ask_git
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
        files = [path for path in code_files(source) if not (source / path).is_relative_to(leave_out)]
    size = sum((source / path).lstat().st_size for path in files)
    if size > LARGEST:
        raise RequestError(
            f"--snapshot: {source} holds {human_bytes(size)}, the limit is {human_bytes(LARGEST)}",
            hint="leave data out with .gitignore, or start from the folder that holds the code",
        )
    target.mkdir(mode=0o700)
    for path in files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        _copy(source, path, target)


def _copy(source: Path, path: Path, target: Path) -> None:
    """Copy a file or link; a relative link out of ``source`` leads to the same place from the copy."""
    link = source / path
    if link.is_symlink() and not os.path.isabs(os.readlink(link)):
        leads_to = os.path.normpath(link.parent.resolve() / os.readlink(link))
        if not Path(leads_to).is_relative_to(source.resolve()):
            (target / path).symlink_to(leads_to)
            return
    shutil.copy2(link, target / path, follow_symlinks=False)


def _is_snapshot(source: Path) -> bool:
    """Whether this is the copy of the code in a run folder."""
    return source.name == "code" and (source.parent / MANIFEST).is_file()


def code_files(source: Path) -> list[Path]:
    """Files below ``source``, relative to it: what git tracks or would track, in submodules and nested repositories
    too; outside git all but the usual caches, and folders that ignore themselves, as run folders do."""
    try:
        listed = ask_git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except CommandMissingError:
        return list(_walk(source))
    if listed.code != 0:
        return list(_walk(source))
    files = []
    for name in (Path(name) for name in listed.out.split("\0") if name):
        if (source / name).is_file() or (source / name).is_symlink():
            files.append(name)
        elif (source / name / ".git").exists():
            files += [name / inner for inner in code_files(source / name)]
    return files


def _walk(source: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in _NOT_CODE and not _ignores_itself(Path(folder, name))]
        for name in (*names, *(name for name in folders if Path(folder, name).is_symlink())):
            yield (Path(folder) / name).relative_to(source)


def _ignores_itself(folder: Path) -> bool:
    try:
        return (folder / ".gitignore").read_text(encoding="utf-8").strip() == "*"
    except (OSError, ValueError):  # there is none, or none of ours
        return False
