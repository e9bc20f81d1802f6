"""Tells whether this machine belongs to a Slurm cluster."""

from __future__ import annotations

import functools
import os
import shutil

from hpcjobs.errors import CommandMissingError
from hpcjobs.processes.programs import run

_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


def slurm_is_here() -> bool:
    """sbatch is installed and has a cluster: its packages alone make no login node."""
    return shutil.which("sbatch") is not None and _has_configuration(os.environ.get("SLURM_CONF"))


@functools.cache
def _has_configuration(conf: str | None) -> bool:
    """A file tells, or else a Slurm command: the configuration may come from the controller (configless)."""
    if conf:
        return os.path.exists(conf)
    if any(map(os.path.exists, _CONFIGURATIONS)):
        return True
    try:
        answer = run(["scontrol", "show", "config"])
    except CommandMissingError:
        return False
    return answer.code == 0 or "configuration source" not in answer.err
