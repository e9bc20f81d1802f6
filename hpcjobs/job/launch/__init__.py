"""Launchers: from a resolved job to the command line that starts its tasks.

A launcher is one function ``Job -> Launch``. Every task runs ``rank.sh`` (`templates/shell`), which sets the rank from
the launcher's variables, runs the program and records the first failure; the launcher says what starts it.
"""

from __future__ import annotations

from hpcjobs.job.launch.base import Launch, Launcher, Raw, command_line, entering, task
from hpcjobs.job.launch.horovod import horovod_gloo, horovodrun
from hpcjobs.job.launch.mpi import mpirun
from hpcjobs.job.launch.slurm import batch, gpus_of_node, srun, srun_args
from hpcjobs.job.launch.torch import spawn, torchrun
from hpcjobs.job.models import Job

__all__ = [
    "LAUNCHERS",
    "Launch",
    "Launcher",
    "Raw",
    "command_line",
    "entering",
    "gpus_of_node",
    "launch",
    "launched_by",
    "srun_args",
    "task",
]

# The first of its scheduler's is what a site uses that names none: those that need nothing installed come first.
LAUNCHERS = {
    "srun": Launcher(srun, ("slurm",)),
    "spawn": Launcher(spawn, ("local",)),
    "torchrun": Launcher(torchrun, ("slurm", "local")),
    "mpirun": Launcher(mpirun, ("slurm", "local")),
    "horovod-gloo": Launcher(horovod_gloo, ("slurm", "local")),
    "horovodrun": Launcher(horovodrun, ("slurm", "local")),
    "batch": Launcher(batch, ("slurm",)),
}


def launch(job: Job) -> Launch:
    """How ``job``'s launcher starts its tasks."""
    return LAUNCHERS[job.launcher].build(job)


def launched_by(job: Job) -> str:
    """The launcher in words, for messages: what was tried is half of why it failed."""
    return f"srun --mpi={job.mpi}" if job.launcher == "srun" and job.mpi else job.launcher
