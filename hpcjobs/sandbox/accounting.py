"""Runs Slurm's commands in the sandbox, and fills its accounting for the first jobs."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence

from hpcjobs import slurm_commands
from hpcjobs.processes.programs import Result, run
from hpcjobs.sandbox.daemons import must, program
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.models import Layout
from hpcjobs.units import time_limit, time_limit_s

_PEOPLE = range(1000, 60_000)
"""User ids of people, without Debian's system users."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*\Z", re.ASCII)


def _with_slurm_conf(folder: Folder, argv: Sequence[str]) -> list[str]:
    return ["env", f"SLURM_CONF={folder.slurm_conf}", program(argv[0]), *argv[1:]]


def slurm(folder: Folder, argv: Sequence[str]) -> Result:
    """Run a Slurm command against this sandbox, whatever SLURM_CONF says."""
    return run(_with_slurm_conf(folder, argv))


def node_states(folder: Folder) -> dict[str, str]:
    """Host -> state in sinfo's spelling; empty when the controller does not answer."""
    done = slurm(folder, slurm_commands.list_node_states())
    return dict(line.split() for line in done.out.splitlines()) if done.code == 0 else {}


def fill_accounting(folder: Folder, layout: Layout) -> None:
    """Cluster, QOS with their limits, accounts, and the users who may submit: everybody whom this machine knows."""
    _manage(folder, "add", "cluster", layout.cluster)
    if others := [name for name in layout.qos if name != "normal"]:
        _manage(folder, "add", "qos", ",".join(others))
    for name, limit in layout.qos.items():
        if time_limit_s(limit or None) is not None:
            wall = f"MaxWall={time_limit(limit)}"
            # DenyOnLimit: too long a job is refused when it is submitted, instead of pending for ever.
            _manage(folder, "modify", "qos", name, "set", wall, "Flags=DenyOnLimit")
    accounts = ",".join(layout.accounts)
    _manage(folder, "add", "account", accounts, *_account_options(layout))
    add_users(folder, layout, users_of_the_machine())


def users_of_the_machine() -> list[str]:
    """Root, who called sudo, and the people in the machine's list of users (a directory service may not list all)."""
    people = [entry.pw_name for entry in pwd.getpwall() if entry.pw_uid in _PEOPLE and _NAME.match(entry.pw_name)]
    return list(dict.fromkeys(["root", os.environ.get("SUDO_USER") or "root", *people]))


def add_users(folder: Folder, layout: Layout, users: Sequence[str]) -> None:
    """Let these users submit under every account of the sandbox; users with access stay unchanged."""
    # Of an account of the sandbox: slurmdbd itself makes a user root, who has the account root alone.
    of_an_account = slurm_commands.list_associations(["User"], account=layout.accounts[0])
    allowed = must(_with_slurm_conf(folder, of_an_account)).split()
    if not (others := [user for user in users if user not in allowed]):
        return  # sacctmgr would call it an error
    options = _account_options(layout)
    accounts = f"account={','.join(layout.accounts)}"
    _manage(folder, "add", "user", ",".join(others), accounts, f"defaultaccount={layout.accounts[0]}", *options)


def _account_options(layout: Layout) -> tuple[str, ...]:
    return (f"cluster={layout.cluster}", f"qos={','.join(layout.qos)}", "defaultqos=normal")


def _manage(folder: Folder, *arguments: str) -> None:
    must(_with_slurm_conf(folder, slurm_commands.change_accounting(*arguments)))
