"""Checks the machine for the needs of a sandbox: root, Debian or Ubuntu, and packages, which can be installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath

from hpcjobs.errors import RequestError
from hpcjobs.processes.programs import run
from hpcjobs.sandbox.folder import Folder, must, write

PACKAGES = (
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin",
    "munge", "mariadb-server", "libpmix2", "libpmix-dev", "iproute2",
)  # fmt: skip


def check(*, install: bool, say: Callable[[str], None]) -> None:
    """Refuse a machine that cannot run a sandbox; ``install``: install missing packages.

    Raises:
        RequestError: not root, not Debian or Ubuntu, or packages are missing: names the command.
        HpcJobsError: apt-get failed.
    """
    if not is_debian():
        raise RequestError(
            "a sandbox needs Debian or Ubuntu (its packages come by apt)",
            hint="use a container or virtual machine with Debian 12, or --site local, which needs no Slurm",
        )
    missing = missing_packages()
    if missing and not install:
        raise RequestError(f"packages are missing: {', '.join(missing)}", hint=f"{apt_line(missing)} (or --install)")
    if os.geteuid() != 0:
        raise RequestError(
            "a sandbox makes network namespaces and mounts, which only root may",
            hint="sudo hpcjobs sandbox up, or --site local, which needs neither root nor Slurm",
        )
    if missing:
        say(apt_line(missing))
        must(["apt-get", "update"])
        must(["env", "DEBIAN_FRONTEND=noninteractive", *apt_line(missing).split()])


def is_debian() -> bool:
    """Whether this machine runs Debian or a derivative, by /etc/os-release."""
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return False
    arguments = " ".join(line.partition("=")[2].strip('"') for line in lines if line.startswith(("ID=", "ID_LIKE=")))
    return not {"debian", "ubuntu"}.isdisjoint(arguments.split())


def missing_packages() -> list[str]:
    """Those of ``PACKAGES`` that dpkg does not have installed (or that a later release renamed)."""
    done = run(["dpkg-query", "--show", "--showformat=${Package} ${Provides} ${db:Status-Status}\n"])
    installed = [line for line in done.out.splitlines() if line.endswith(" installed")]
    have = {name.strip(",") for line in installed for name in line.split()}
    return [name for name in PACKAGES if name not in have]


def apt_line(packages: list[str]) -> str:
    """The command that installs ``packages``."""
    return "apt-get install -y --no-install-recommends " + " ".join(packages)


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

    Of ``gcc`` and ``gcc/12`` only the second becomes a file: loading ``gcc`` finds it.
    """
    folder.modulefiles.mkdir()
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    for name in set(names) - folders:
        path = folder.modulefiles / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, _EMPTY)
