"""Tasks started by torch's elastic agents, or as children of one process on this machine."""

from __future__ import annotations

import sys

from hpcjobs.job.launch.base import AGENT, TASK, Launch, Raw, command_line, entering
from hpcjobs.job.launch.slurm import pyxis_python, srun_args
from hpcjobs.job.models import Job

MOST_RESTARTS = 1000
QUIET = 'export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"'
"""The agent of the first node keeps the store and may leave first: torch's C++ then warns each other agent, which is
ending too, by a trace of the lost connection. Errors are still printed."""

STORE_OF_RANK_0 = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Each start of the ranks has a store of its own, which rank 0 keeps. The agents' store is that of the first start:
restarts for a node that joined or left are not counted, ranks would meet their predecessors' entries there, and it is
lost with the node of the first rank 0."""


def torchrun(job: Job) -> Launch:
    """One elastic agent per node, which starts the node's ranks; again within the allocation, with retries.

    The agent needs torch: in a container it runs inside, and the task wrapper with it.
    """
    cpus = (job.resources.cpus_per_task or 1) * job.ntasks_per_node
    least = f"{job.min_nodes}:" if job.min_nodes else ""
    agent_words = [
        *entering(job),
        *(job.python, "-m", "torch.distributed.run"),
        Raw(f'--nnodes="{least}$HPCJOBS_NNODES"'),
        f"--nproc-per-node={job.ntasks_per_node}",
        "--rdzv-backend=c10d",
        Raw('--rdzv-id="$HPCJOBS_JOB_ID"'),
        Raw('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
        Raw('--rdzv-conf="is_host=$(( ${SLURM_NODEID:-0} == 0 ))"'),
        Raw('--local-addr="$node_addr"'),
        *((f"--max-restarts={min(job.retries.node, MOST_RESTARTS)}",) if job.retries else ()),
        "--no-python",
        Raw(r'"${@//\$/\$\$}"'),  # the agent takes these for templates, in which two dollars are one
    ]
    agent = command_line(agent_words)
    before = (QUIET, STORE_OF_RANK_0) if job.retries else (QUIET,)
    ranks = ("export NODE_RANK=$GROUP_RANK", *pyxis_python(job))
    start = (*AGENT, *((Raw('"$enter"'),) if entering(job) else ()), *TASK, *job.argv)
    if job.scheduler == "local":
        return Launch(command=start, ranks=ranks, before=before, agent=agent, label=job.ntasks > 1)
    args = srun_args(job, tasks_per_node=1, cpus_per_task=cpus)
    return Launch(command=("srun", *args, *start), ranks=ranks, before=before, agent=agent, label=job.ntasks > 1)


def children(job: Job) -> tuple[str, ...]:
    """The whole command: one process that starts the tasks and ends them together."""
    tokens = (sys.executable, "-m", "hpcjobs.runtime.spawn", f"--ntasks={job.ntasks_per_node}", "--")
    return (*tokens, *TASK, *entering(job), *job.argv)


def spawn(job: Job) -> Launch:
    """The tasks as children of one process on this machine, ended together."""
    return Launch(command=children(job), label=job.ntasks > 1)
