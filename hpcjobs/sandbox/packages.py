"""Checks that the machine has what a sandbox needs: root, Debian or Ubuntu, and packages, which can be installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hpcjobs.errors import RequestError
from hpcjobs.processes.programs import run
from hpcjobs.sandbox.daemons import must

PACKAGES = (
    "slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin",
    "munge", "mariadb-server", "libpmix2", "libpmix-dev", "iproute2",
)  # fmt: skip


def check(*, install: bool, say: Callable[[str], None]) -> None:
    """Refuse a machine on which no sandbox can be, or (``install``) put the packages on it.

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
