"""The faults of drills, and how each is caused in a running job with a user's own rights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import hpcjobs
from hpcjobs.errors import HpcJobsError
from hpcjobs.job.models import JobSpec
from hpcjobs.processes.programs import run
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.site.models import Resources, Site
from hpcjobs.slurm_commands import cluster_env

# Run on a node. $1: the job's id; $2: the rank, which is in the environment of the program and of what it started,
# and of nothing else; without it any rank.
_FIND = """\
grep -slzx "HPCJOBS_JOB_ID=$1" /proc/[0-9]*/environ |
    xargs -r grep -slzx "RANK=${2:-[0-9]*}" | cut -d / -f 3"""
_KILL = f"pids=$({_FIND}); kill -9 $pids"
_TELL = f"pids=$({_FIND}); kill -TERM $pids"
# For a program, a file that cannot grow is the same as a full disk or an exhausted quota.
_LIMIT = f'for pid in $({_FIND}); do prlimit --pid $pid --fsize=$3: && done=1; done; [ -n "$done" ]'


class DrillTarget(NamedTuple):
    """A job that runs, as its faults see it."""

    job_id: str
    nodes: Sequence[str]
    ranks: int
    scheduler: Scheduler
    has_steps: bool
    """Whether signals reach its ranks by the scheduler."""
    slurm_conf: str | None


class Fault(NamedTuple):
    """A fault: its description, its injection, and its expected trace in the history."""

    about: str
    inject: Callable[[DrillTarget], None] | None
    """None: the time limit does it."""
    heal: Callable[[DrillTarget], None] | None
    causes: tuple[str, ...]
    """Permitted causes of the end of the attempt; empty: no attempt ends."""
    lossless: bool
    """It is announced: no step may be lost."""


def _do(target: DrillTarget, *argv: str) -> None:
    done = run(argv, env=cluster_env(target.slurm_conf))
    if done.code != 0:
        output = (done.err or done.out).strip() or "no process of it was found"
        raise HpcJobsError(
            f"the fault could not be injected into job {target.job_id}: {argv[0]}: {output}",
            hint="if the program was over already, give it more steps, or an earlier --at-step",
        )


def _on_node(target: DrillTarget, node: str, script: str, *arguments: str) -> None:
    there = target.scheduler.step(target.job_id, [node], "--mem=0")
    _do(target, *there, "sh", "-c", script, "sh", target.job_id, *arguments)


def _tell(target: DrillTarget) -> None:
    if target.has_steps:
        target.scheduler.signal([target.job_id], "TERM", batch_script=False)
    else:
        _on_node(target, target.nodes[0], _TELL)


def _last_rank(target: DrillTarget) -> None:
    _on_node(target, target.nodes[-1], _KILL, str(target.ranks - 1))


FAULTS = {
    "timeout": Fault(
        about="the time limit comes before the end of the program",
        inject=None,
        heal=None,
        causes=("timeout",),
        lossless=True,
    ),
    "preempt": Fault(
        about="SIGTERM to every step, as at the start of a preemption's grace time",
        inject=_tell,
        heal=None,
        causes=("preempt",),
        lossless=True,
    ),
    "kill-rank": Fault(
        about="SIGKILL to the last rank",
        inject=_last_rank,
        heal=None,
        causes=("node",),
        lossless=False,
    ),
    "kill-node": Fault(
        about="SIGKILL to every rank on the last node, at once",
        inject=lambda target: _on_node(target, target.nodes[-1], _KILL),
        heal=None,
        causes=("node", "preempt"),
        lossless=False,
    ),
    "full-disk": Fault(
        about="no file of rank 0 can grow any more, as on a full disk; after a while it can again",
        inject=lambda target: _on_node(target, target.nodes[0], _LIMIT, "0", "0"),
        heal=lambda target: _on_node(target, target.nodes[0], _LIMIT, "0", "unlimited"),
        causes=(),
        lossless=True,
    ),
}


TAKEN_S = 300.0
"""Longest time of a preemption in seconds: the grace time of the partition, and a cycle of the scheduler."""


def taken_by(partition: str, site: Site) -> Fault:
    """Preemption itself: a job of ``partition``, which is of higher priority, takes the nodes."""

    def take(target: DrillTarget) -> None:
        nodes = ",".join(target.nodes)
        resources = Resources(partition=partition, time="1m", exclusive=True, nodes=len(target.nodes), nodelist=nodes)
        request = JobSpec(program=("true",), name="drill-taker", resources=resources)
        taker = hpcjobs.submit(hpcjobs.plan(request, site, made_by="hpcjobs drill"))
        try:
            taker.wait(TAKEN_S)
        except BaseException as error:
            taker.cancel()
            if not isinstance(error, TimeoutError):
                raise
            raise HpcJobsError(
                f"job {taker.id} of partition {partition} did not get the nodes of job {target.job_id}, "
                f"{nodes}, in {TAKEN_S:.0f} s",
                hint="-p names a partition whose jobs may be preempted, --by one of higher priority with the same "
                "nodes: scontrol show partition tells PriorityTier and PreemptMode",
            ) from error

    about = f"a job of partition {partition} preempts it"
    return Fault(about=about, inject=take, heal=None, causes=("preempt",), lossless=True)
