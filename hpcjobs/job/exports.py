"""Shell lines that set the environment of every task of a job."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from hpcjobs.job.models import Job


def omp_threads(job: Job) -> int:
    """Threads that a task computes with: as many as it has CPUs."""
    return job.resources.cpus_per_task or 1


def export_lines(job: Job, *, launched_by: str) -> Iterator[str]:
    """The lines, in order; the job's own variables come last and win."""
    q = shlex.quote
    if job.scheduler == "slurm":
        first = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        nodes = "$SLURM_JOB_NUM_NODES"
        yield f"MASTER_ADDR={first}{q(job.address_suffix) if job.address_suffix else ''}"
    else:
        nodes = str(job.nodes)
        yield f"MASTER_ADDR={q(job.hosts[0]) if job.hosts else '127.0.0.1'}"
    yield "MASTER_PORT=$(free_port) # on this node, where rank 0 will run"
    yield f"export MASTER_ADDR MASTER_PORT HPCJOBS_NNODES={nodes} HPCJOBS_NTASKS_PER_NODE={job.ntasks_per_node}"
    yield "export HPCJOBS_NTASKS=$((HPCJOBS_NNODES * HPCJOBS_NTASKS_PER_NODE))"
    yield f"export HPCJOBS_LAUNCHED_BY={q(launched_by)} OMP_NUM_THREADS={omp_threads(job)}"
    if job.interface:
        name = q(job.interface)
        yield f"export HPCJOBS_IFNAME={name} GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    for variable, value in job.env.items():
        yield f"export {variable}={q(value)}"
