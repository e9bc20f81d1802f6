"""Launchers: from a settled job to the command line that starts its tasks.

A launcher is one function ``Job -> Launch``. Every task starts inside the task wrapper of the script,
which publishes its rank, runs the program and records the first failure; a launcher says how the wrapper
learns the rank (``ranks``) and what starts it (``command``).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcjobs.job.models import Job


class Raw(str):
    """Shell text that stands in a command line as it is; every other token is quoted."""


class Launch(NamedTuple):
    """How the tasks start."""

    command: tuple[str, ...]
    ranks: tuple[str, ...] = ()
    """Shell lines, run in each task, that set RANK and its kin."""
    agent: str | None = None
    """Command run once per node, which starts the tasks there (an elastic agent, say)."""
    label: bool = False
    """The task itself puts ``RANK: `` before each line it prints; ``srun --label`` does it otherwise."""


class Launcher(NamedTuple):
    """A launcher and the schedulers it works under."""

    build: Callable[[Job], Launch]
    schedulers: tuple[str, ...]


_TASK = ("bash", "-c", Raw('"$task"'), "task")
_AGENT = ("bash", "-c", Raw('"$agent"'), "agent")


def command_line(tokens: Sequence[str]) -> str:
    """``tokens`` as one line of shell: the single place where words are quoted."""
    return " ".join(token if isinstance(token, Raw) else shlex.quote(token) for token in tokens)


def srun_args(job: Job, *, tasks_per_node: int, cpus_per_task: int | None) -> tuple[str, ...]:
    """Options of the ``srun`` that fills the allocation.

    Said again although the allocation knows them: Slurm 22.05 to 23.02 does not pass
    ``--cpus-per-task`` on, and a task count left to the environment would win over the layout.
    """
    tokens: list[str] = [
        Raw('--nodes="$SLURM_JOB_NUM_NODES"'),
        Raw(f'--ntasks="$((SLURM_JOB_NUM_NODES * {tasks_per_node}))"'),
        f"--ntasks-per-node={tasks_per_node}",
    ]
    if cpus_per_task is not None:
        tokens.append(f"--cpus-per-task={cpus_per_task}")
    if job.mpi is not None:
        tokens.append(f"--mpi={job.mpi}")
    tokens.append("--kill-on-bad-exit=1")
    return tuple(tokens)


def srun(job: Job) -> Launch:
    """One task per rank, started by Slurm."""
    args = srun_args(job, tasks_per_node=job.ntasks_per_node, cpus_per_task=job.resources.cpus_per_task or None)
    label = ("--label",) if job.ntasks > 1 else ()
    return Launch(
        command=("srun", *args, *label, *_TASK, *job.argv),
        ranks=(
            "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID",
            f"export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE={job.ntasks_per_node}",
        ),
    )


def torchrun(job: Job) -> Launch:
    """One elastic agent per node, which starts the node's ranks."""
    cpus = (job.resources.cpus_per_task or 1) * job.ntasks_per_node
    agent_words = [
        *(job.python, "-m", "torch.distributed.run"),
        Raw('--nnodes="$HPCJOBS_NNODES"'),
        f"--nproc-per-node={job.ntasks_per_node}",
        "--rdzv-backend=c10d",
        Raw('--rdzv-id="$HPCJOBS_JOB_ID"'),
        Raw('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
        Raw('--rdzv-conf="is_host=$(( ${SLURM_NODEID:-0} == 0 ))"'),
        Raw('--local-addr="$node_addr"'),
        "--no-python",
        Raw('"$@"'),
    ]
    agent = command_line(agent_words)
    ranks = ("export NODE_RANK=$GROUP_RANK",)
    if job.scheduler == "local":
        return Launch(command=(*_AGENT, *_TASK, *job.argv), ranks=ranks, agent=agent, label=job.ntasks > 1)
    args = srun_args(job, tasks_per_node=1, cpus_per_task=cpus)
    return Launch(command=("srun", *args, *_AGENT, *_TASK, *job.argv), ranks=ranks, agent=agent, label=job.ntasks > 1)


def spawn(job: Job) -> Launch:
    """The tasks as children of one process on this machine, ended together."""
    tokens = (sys.executable, "-m", "hpcjobs.runtime.spawn", f"--ntasks={job.ntasks_per_node}", "--")
    return Launch(command=(*tokens, *_TASK, *job.argv), label=job.ntasks > 1)


LAUNCHERS = {
    "srun": Launcher(srun, ("slurm",)),
    "torchrun": Launcher(torchrun, ("slurm", "local")),
    "spawn": Launcher(spawn, ("local",)),
}


def launch(job: Job) -> Launch:
    """How ``job``'s launcher starts its tasks."""
    return LAUNCHERS[job.launcher].build(job)
