"""``module load`` on the hosts: Environment Modules of this machine, with the site's modules as empty modulefiles."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePosixPath

from hpcjobs.sandbox.folder import Folder, write
from hpcjobs.sandbox.packages import apt_line

PACKAGE = "environment-modules"
SEARCHED = Path("/etc/environment-modules/modules")
"""The folder of the package for modulefiles of the machine's own; a host has the sandbox's there."""
_EMPTY = "#%Module1.0\n"


def available() -> bool:
    """Whether this machine has Environment Modules of Debian's package."""
    return SEARCHED.is_dir() and Path("/usr/share/modules/init/bash").is_file()


def reason_for_none() -> str:
    """Why a module of the site is not there."""
    if available():
        return "only modules that are named by name, or name and version, are rehearsed"
    return f"this machine has no Environment Modules ({apt_line([PACKAGE])})"


def write_modulefiles(folder: Folder, names: Collection[str]) -> None:
    """Make a modulefile without content for each module.

    Of ``gcc`` and ``gcc/12`` only the second becomes a file: it is what loading the first finds.
    """
    folder.modulefiles.mkdir()
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    for name in set(names) - folders:
        path = folder.modulefiles / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, _EMPTY)
