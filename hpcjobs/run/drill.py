"""Runs one drill from submission to verdict: the same program twice, undisturbed and with a fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import hpcjobs
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.job.layers import make_spec
from hpcjobs.job.models import JobSpec, Plan
from hpcjobs.processes.programs import run
from hpcjobs.record import CONTROL, METRICS, STATE
from hpcjobs.record.control import STEPS, ControlDir
from hpcjobs.record.manifest import read_manifest
from hpcjobs.record.metrics import decode_step, read_lines
from hpcjobs.record.state import read_state_file
from hpcjobs.run.submit import JobHandle
from hpcjobs.scheduler.base import Scheduler, connect
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Resources, Site
from hpcjobs.slurm_commands import cluster_env, read_hosts

# Run on a node. $1: the job's id; $2: the rank, which only the environment of the program and its children has;
# without $2 any rank.
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
    causes: tuple[str, ...]
    """Permitted causes of the end of the attempt; empty: no attempt ends."""
    lossless: bool
    """It is announced: no step may be lost."""
    inject: Callable[[DrillTarget], None] | None = None
    """None: the time limit does it."""
    heal: Callable[[DrillTarget], None] | None = None


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


FAULTS = {
    "timeout": Fault(
        about="the time limit comes before the end of the program",
        causes=("timeout",),
        lossless=True,
    ),
    "preempt": Fault(
        about="SIGTERM to every step, as at the start of a preemption's grace time",
        inject=_tell,
        causes=("preempt",),
        lossless=True,
    ),
    "kill-rank": Fault(
        about="SIGKILL to the last rank",
        inject=lambda target: _on_node(target, target.nodes[-1], _KILL, str(target.ranks - 1)),
        causes=("node",),
        lossless=False,
    ),
    "kill-node": Fault(
        about="SIGKILL to every rank on the last node, at once",
        inject=lambda target: _on_node(target, target.nodes[-1], _KILL),
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
    return Fault(about=about, inject=take, causes=("preempt",), lossless=True)


PROGRAM = ("ddp", "--workload", "lm", "--train-samples", "512", "--log-every", "1", "--checkpoint-every", "10")
"""Without one of the user's own."""
STEPS_OF = {"timeout": "1500", "full-disk": "600"}
RETRIES = "timeout=∞,preempt=∞,node=3,error=0"
POLL_S = 0.2
FULL_S = 8.0
"""Seconds of the full disk."""


class DrillVerdict(NamedTuple):
    """Result of a drill."""

    fault: str
    about: str
    site: str
    job_id: str
    passed: bool
    problems: tuple[str, ...]
    attempts: int
    steps: int
    resumed_at: int | None
    """Step that the last attempt took up; None: none had to."""
    lost: int
    """Steps that were done twice."""
    resume_s: float | None
    """Seconds from the fault, or the end ahead of the limit, to the first step after it."""
    losses_compared: int
    difference: float
    """Largest relative difference of a loss to the run left alone."""
    run_dir: str


def drill(
    fault: str,
    program: Sequence[str] = (),
    *,
    site: str | None = None,
    by: str | None = None,
    at_step: int = 40,
    tolerance: float = 0.0,
    timeout_s: float = 1800.0,
    say: Callable[[str], None] = lambda line: None,
    options: Mapping[str, object] | None = None,
) -> DrillVerdict:
    """Run ``program`` twice on ``site`` with ``options`` of submission, once with ``fault`` from ``at_step`` on.

    ``by``: for ``preempt``, the partition of higher priority; a job there preempts the run. Otherwise a signal
    imitates the preemption.

    Raises RequestError: no such fault. HpcJobsError: the fault could not be injected, or the job did not go on in time.
    """
    if fault not in FAULTS:
        raise RequestError(f"no fault {fault!r}", hint=", ".join(FAULTS))
    where = load_site(site or default_site())
    if by is not None and (fault != "preempt" or not where.kind.has_partitions):
        raise RequestError(f"--by {by}: only preempt, on a site with Slurm, is done by a job of another partition")
    layout = {"nodes": 2} if where.kind.has_nodes else {"ntasks_per_node": 2}  # two ranks, as far apart as possible
    chosen_options: dict[str, object] = {**layout, **(options or {})}
    chosen, arguments = FAULTS[fault], tuple(program) or (*PROGRAM, "--steps", STEPS_OF.get(fault, "300"))
    if by is not None:
        chosen = taken_by(by, where)
    limit = {"time": "1m", "signal_before": "20s"} if chosen.inject is None else {}
    fields = {"retries": RETRIES, **limit, **chosen_options, **({"exclusive": True} if by is not None else {})}
    undisturbed = _plan(arguments, where, {"name": "drill-alone", **chosen_options})
    disturbed = _plan(arguments, where, {"name": f"drill-{fault}", **fields})
    handles: list[JobHandle] = []
    try:
        handles.append(alone := hpcjobs.submit(undisturbed))
        handles.append(job := hpcjobs.submit(disturbed))
        say(f"job {alone.id} runs undisturbed; to job {job.id} it happens: {chosen.about}")
        resume_s = _disturb(job, chosen, at_step=at_step, give_up=time.monotonic() + timeout_s, say=say)
        for handle in (job, alone):
            handle.wait(timeout_s)
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return _judge(fault, chosen, job, alone, resume_s=resume_s, tolerance=tolerance)


def _plan(arguments: Sequence[str], site: Site, options: Mapping[str, object]) -> Plan:
    return hpcjobs.plan(make_spec(arguments, options), site, made_by="hpcjobs drill")


def _disturb(job: JobHandle, fault: Fault, *, at_step: int, give_up: float, say: Callable[[str], None]) -> float | None:
    """Let it happen; seconds until the job made a step again, None where none of its attempts ended."""

    def until(condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if time.monotonic() > give_up or job.state.ended:
                raise HpcJobsError(f"job {job.id} ended, or time was over, before {what}; its folder: {job.run_dir}")
            time.sleep(POLL_S)

    if fault.inject is not None:
        until(lambda: _step(job) >= at_step, f"step {at_step}")
        say(f"job {job.id} is at step {_step(job)}: now")
        target = _target(job)
        began = time.time()
        fault.inject(target)
        if fault.heal is not None:
            time.sleep(FULL_S)
            fault.heal(target)
    if not fault.causes:
        return None
    until(lambda: bool(job.attempts), "an attempt ended")
    first = job.attempts[0]
    ended = began if fault.inject is not None else first.ended or time.time()
    say(f"job {job.id}: {first.cause} at step {first.steps}, {first.lost} lost; {first.decision}")
    place = job.run_dir / CONTROL / STEPS
    if not place.exists():
        raise HpcJobsError(
            f"job {job.id} has reported no step, so that nothing can be compared; its folder: {job.run_dir}",
            hint="a bundled trainer, or a script with the calls of `hpcjobs help own_scripts`",
        )
    until(lambda: len(job.attempts) > 1 or place.stat().st_mtime > (first.ended or ended) + 1, "it went on")
    return place.stat().st_mtime - ended


def _step(job: JobHandle) -> int:
    return ControlDir(str(job.run_dir)).steps


def _target(job: JobHandle) -> DrillTarget:
    state = read_state_file(job.run_dir / STATE)
    per_node = read_manifest(job.run_dir).request.ntasks_per_node
    nodes = read_hosts(state.nodes)
    entry = job.entry
    return DrillTarget(
        job.id,
        nodes,
        ranks=len(nodes) * per_node,
        scheduler=connect(entry.scheduler, entry.slurm_conf),
        has_steps=entry.kind.runs_steps,
        slurm_conf=entry.slurm_conf,
    )


def _judge(
    name: str, fault: Fault, job: JobHandle, alone: JobHandle, *, resume_s: float | None, tolerance: float
) -> DrillVerdict:
    past, summary = job.attempts, job.summary() or {}
    agreed, lost = compare(alone.run_dir, job.run_dir), sum(attempt.lost for attempt in past)
    resumed = summary.get("resumed_from_step")
    problems = []
    for handle, who in ((job, "the disturbed run"), (alone, "the run left alone")):
        if handle.state.value != "COMPLETED":
            problems.append(f"{who}, job {handle.id}, is {handle.state.value}")
    if fault.causes and len(past) < 2:
        problems.append("no attempt ended: the program was over before the fault; give it more steps")
    if fault.causes and past and past[0].cause not in fault.causes:
        problems.append(f"the first attempt ended of {past[0].cause}, not of {' or '.join(fault.causes)}")
    if len(past) > 1 and resumed != past[-2].saved:
        problems.append(f"resumed at step {resumed}, but {past[-2].saved} was saved")
    if fault.lossless and lost:
        problems.append(f"{lost} steps were lost, although the end was announced")
    if not fault.causes and "not written" not in job.logs():
        problems.append("no checkpoint was due while the disk was full: nothing was shown")
    if agreed.steps == 0 or agreed.difference > tolerance:
        problems.append(f"losses differ by up to {agreed.difference:.2g} over {agreed.steps} steps")
    return DrillVerdict(
        fault=name,
        about=fault.about,
        site=job.entry.site,
        job_id=job.id,
        passed=not problems,
        problems=tuple(problems),
        attempts=len(past),
        steps=int(summary.get("steps") or 0),
        resumed_at=resumed,
        lost=lost,
        resume_s=resume_s,
        losses_compared=agreed.steps,
        difference=agreed.difference,
        run_dir=str(Path(job.run_dir)),
    )


ROUNDING = 1e-12
"""Of sums that were added up in another order."""


class Losses(NamedTuple):
    """Agreement of two runs: number of common steps, and the largest relative difference of a loss."""

    steps: int
    difference: float


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> mean loss of the steps since the line before."""
    path = run_dir / METRICS
    steps = map(decode_step, read_lines(path)) if path.exists() else ()
    return {step.step: step.loss for step in steps if step is not None and step.loss is not None}


def sums(by_step: dict[int, float]) -> dict[int, float]:
    """Step -> sum of all losses up to it: a run that was stopped has a line more, over fewer steps each."""
    sums, total, before = {}, 0.0, 0
    for step, mean in sorted(by_step.items()):
        total += mean * (step - before)
        sums[step], before = total, step
    return sums


def compare(one: Path, other: Path) -> Losses:
    """Compare losses if both runs have the same lines, otherwise their sums up to the same step."""
    first, second = losses(one), losses(other)
    rounding = 0.0
    if first.keys() != second.keys():
        first, second, rounding = sums(first), sums(second), ROUNDING
    both = sorted(first.keys() & second.keys())
    worst = max((abs(first[s] - second[s]) / max(abs(first[s]), 1e-30) for s in both), default=float("inf"))
    return Losses(len(both), worst if worst > rounding else 0.0)
