"""Tasks started by torch's elastic agents, or as children of one process on this machine."""

from __future__ import annotations

import sys

from hpcjobs.job.launch.base import Launch, Raw, entering, task
from hpcjobs.job.launch.slurm import srun_args
from hpcjobs.job.models import Job
from hpcjobs.processes.modules import module_words, own_module_words

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

    The agent needs torch: in a container it runs inside, and ``rank.sh`` with it.
    """
    least = f"{job.min_nodes}:" if job.min_nodes else ""
    agent = (
        *("bash", Raw('"$_hj_shell/agent.sh"')),
        *((f"--address-suffix={job.address_suffix}",) if job.scheduler == "slurm" and job.address_suffix else ()),
        *((f"--numa-binding={numa}",) if (numa := job.affinity.numa_binding or "none") != "none" else ()),
        *entering(job),
        *(job.python, *module_words("torch.distributed.run")),
        Raw(f'--nnodes="{least}$HPCJOBS_NNODES"'),
        f"--nproc-per-node={job.ntasks_per_node}",
        "--rdzv-backend=c10d",
        Raw('--rdzv-id="$HPCJOBS_JOB_ID"'),
        Raw('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
        *((f"--max-restarts={min(job.retries.node, MOST_RESTARTS)}",) if job.retries else ()),
        "--no-python",
    )
    before = (QUIET, STORE_OF_RANK_0) if job.retries else (QUIET,)
    start = (*agent, *task(job, label=job.ntasks > 1, agents=True), *job.argv)
    if job.scheduler == "local":
        return Launch(command=start, before=before)
    cpus = (job.resources.cpus_per_task or 1) * job.ntasks_per_node
    args = srun_args(job, tasks_per_node=1, cpus_per_task=cpus)
    return Launch(command=("srun", *args, *start), before=before)


def children(job: Job) -> tuple[str, ...]:
    """The whole command: one process that starts the tasks and ends them together."""
    tokens = (sys.executable, *own_module_words("hpcjobs.runtime.spawn"), f"--ntasks={job.ntasks_per_node}", "--")
    return (*tokens, *task(job, label=job.ntasks > 1), *entering(job), *job.argv)


def spawn(job: Job) -> Launch:
    """The tasks as children of one process on this machine, ended together."""
    return Launch(command=children(job))
