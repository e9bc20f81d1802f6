"""Slurm's commands pointed at the sandbox, and what its accounting has to know before a job can run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcjobs.process import Result, run
from hpcjobs.sandbox.daemons import must, program
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.models import Layout
from hpcjobs.units import time_limit, time_limit_s


def _pointed(folder: Folder, argv: Sequence[str]) -> list[str]:
    return ["env", f"SLURM_CONF={folder.slurm_conf}", program(argv[0]), *argv[1:]]


def slurm(folder: Folder, argv: Sequence[str]) -> Result:
    """Run a Slurm command against this sandbox, whatever SLURM_CONF says."""
    return run(_pointed(folder, argv))


def node_states(folder: Folder) -> dict[str, str]:
    """Host -> state, as sinfo names it; empty when the controller does not answer."""
    done = slurm(folder, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
    return dict(line.split() for line in done.out.splitlines()) if done.code == 0 else {}


def fill_accounting(folder: Folder, layout: Layout) -> None:
    """Cluster, QOS with their limits, accounts, and the users who may submit: root and who called sudo."""
    _manage(folder, "add", "cluster", layout.cluster)
    if others := [name for name in layout.qos if name != "normal"]:
        _manage(folder, "add", "qos", ",".join(others))
    for name, limit in layout.qos.items():
        if time_limit_s(limit or None) is not None:
            wall = f"MaxWall={time_limit(limit)}"
            # DenyOnLimit: too long a job is refused when it is submitted, instead of pending for ever.
            _manage(folder, "modify", "qos", name, "set", wall, "Flags=DenyOnLimit")
    accounts = ",".join(layout.accounts)
    owned = (f"cluster={layout.cluster}", f"qos={','.join(layout.qos)}", "defaultqos=normal")
    _manage(folder, "add", "account", accounts, *owned)
    users = ",".join(dict.fromkeys(["root", os.environ.get("SUDO_USER") or "root"]))
    default = f"defaultaccount={layout.accounts[0]}"
    _manage(folder, "add", "user", users, f"account={accounts}", default, *owned)


def _manage(folder: Folder, *words: str) -> None:
    must(_pointed(folder, ["sacctmgr", "--immediate", "--quiet", *words]))
