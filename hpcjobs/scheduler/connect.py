"""Connects to the scheduler that a job or site names."""

from __future__ import annotations

from hpcjobs.scheduler.base import Scheduler


def connect(kind: str, slurm_conf: str | None = None) -> Scheduler:
    """``slurm`` or ``local``; no command is started yet."""
    if kind == "local":
        from hpcjobs.scheduler.local.client import LocalScheduler

        return LocalScheduler()
    from hpcjobs.scheduler.slurm.client import SlurmScheduler

    return SlurmScheduler(slurm_conf)
