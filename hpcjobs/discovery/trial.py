"""Submits, as any job, a small real job per partition and launcher, and one with a GPU where there are some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from time import monotonic
from typing import NamedTuple

from hpcjobs.discovery.compare import SiteFinding
from hpcjobs.errors import HpcJobsError
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.job.plan import plan
from hpcjobs.run.control import cancel
from hpcjobs.run.handle import JobHandle
from hpcjobs.run.submit import submit
from hpcjobs.scheduler.base import State
from hpcjobs.site.models import Resources, Site
from hpcjobs.units import format_count

_MARK = "hpcjobs-check-interfaces"
_MARK_OF_GPUS = "hpcjobs-check-gpus"
_GPUS_OF_TASK = "${CUDA_VISIBLE_DEVICES:-${ROCR_VISIBLE_DEVICES:-${ZE_AFFINITY_MASK-}}}"
_PROGRAM = ("sh", "-c", f"echo {_MARK} $(ls /sys/class/net); echo {_MARK_OF_GPUS} {_GPUS_OF_TASK}")
_LINES = 3


class Trial(NamedTuple):
    """One trial job, or the reason why there is none."""

    subject: str
    partition: str
    handle: JobHandle | None
    refusal: str = ""
    gpus: int = 0


def run_trials(
    site: Site,
    name: str,
    *,
    time: str,
    timeout_s: float,
    without: Collection[str] = (),
    report: Callable[[str], None],
) -> list[SiteFinding]:
    """Run one job in each partition by each launcher that the file names (else by the site's default one).

    The job asks for a GPU where every node of the partition has some. Partitions of ``without`` get none. Jobs that
    have not ended after ``timeout_s`` are cancelled, as are all of them where this is interrupted.
    """
    launchers: tuple[str | None, ...] = site.launchers or (None,)
    tried = [partition for partition in site.partitions if partition not in without]
    trials: list[Trial] = []
    try:
        for partition, launcher in product(tried, launchers):
            trials.append(_start(site, name, partition, launcher, time))
        submitted = sum(trial.handle is not None for trial in trials)
        report(f"{format_count(submitted, 'job')} submitted to site {site.name}; waiting")
        return list(dict.fromkeys(_finish(trials, site, deadline=monotonic() + timeout_s)))
    except BaseException:
        _cancel(trials, report)
        raise


def _cancel(trials: Sequence[Trial], report: Callable[[str], None]) -> None:
    """Cancel what has not ended, since nobody waits for it any more."""
    try:
        outcome = cancel(trial.handle.entry for trial in trials if trial.handle is not None)
    except HpcJobsError as error:
        ids = " ".join(trial.handle.id for trial in trials if trial.handle is not None)
        report(f"the trial jobs could not be cancelled: {error.message}; `hpcjobs cancel {ids}` tries again")
        return
    if outcome.cancelled:
        report(f"cancelled the trial jobs {' '.join(outcome.cancelled)}")


def _start(site: Site, name: str, partition: str, launcher: str | None, time: str) -> Trial:
    subject = f"job in {partition} by {launcher or 'the default launcher'}"
    nodes = site.partitions[partition].min_nodes or 1
    gpus = int(site.gpu_request != "none" and all(group.gpus for group in site.partitions[partition].groups))
    spec = Layer("sites check", JobSpec(resources=Resources(gpus_per_node=gpus))) if gpus else None
    try:
        planned = plan(
            _PROGRAM, site, partition=partition, launcher=launcher, time=time, nodes=nodes, ntasks_per_node=1,
            name="sites-check", made_by=f"hpcjobs sites check --run {name}", spec=spec,
        )  # fmt: skip
        return Trial(subject, partition, submit(planned), gpus=gpus)
    except HpcJobsError as error:
        return Trial(subject, partition, None, " ".join(error.message.split()))


def _finish(trials: Sequence[Trial], site: Site, *, deadline: float) -> Iterator[SiteFinding]:
    """What became of each job; one that has not ended by ``deadline`` is cancelled."""
    for trial in trials:
        if trial.handle is None:
            yield SiteFinding(trial.subject, "wrong", trial.refusal, "what the message names")
            continue
        try:
            trial.handle.wait(timeout_s=max(0.0, deadline - monotonic()))
        except TimeoutError:
            reasons = {record.reason or record.state.value for record in trial.handle.records}
            trial.handle.cancel()
            text = f"job {trial.handle.id} had not ended in time: {', '.join(sorted(reasons))}"
            yield SiteFinding(trial.subject, "wrong", text, "a partition that starts jobs, or --timeout")
            continue
        yield from _judge(trial, trial.handle, site)


def _judge(trial: Trial, handle: JobHandle, site: Site) -> Iterator[SiteFinding]:
    log = handle.logs()
    if (state := handle.state) is not State.COMPLETED:
        lines = " / ".join(line.strip() for line in log.splitlines()[-_LINES:])
        yield SiteFinding(
            trial.subject, "wrong", f"job {handle.id} is {state.value}: {lines}", f"hpcjobs why {handle.id}"
        )
        return
    moved_to = next((record.partition for record in handle.records if record.partition is not None), trial.partition)
    if moved_to != trial.partition:
        text = f"job {handle.id} ran in {moved_to}: the cluster moved it, so {trial.partition} was not tried"
        yield SiteFinding(trial.subject, "note", text)
    else:
        yield SiteFinding(trial.subject, "ok", f"job {handle.id} ran")
    names = _words_after(log, _MARK)
    if names and site.interface is not None:
        shown = ", ".join(names)
        if site.interface in names:
            yield SiteFinding("interface", "ok", f"the nodes have {site.interface}")
        else:
            text = f"is {site.interface}; the node of job {handle.id} has {shown}"
            yield SiteFinding("interface", "wrong", text, f"interface: one of {shown}")
    if trial.gpus:
        yield _judge_gpus(log, handle, site)


def _judge_gpus(log: str, handle: JobHandle, site: Site) -> SiteFinding:
    if devices := _words_after(log, _MARK_OF_GPUS):
        return SiteFinding(
            "gpu_request", "ok", f"{site.gpu_request} gives GPUs: job {handle.id} saw {' '.join(devices)}"
        )
    text = f"by {site.gpu_request} job {handle.id} got a GPU, and its task saw none (CUDA_, ROCR_VISIBLE_DEVICES)"
    return SiteFinding(
        "gpu_request", "wrong", text, "gpu_request: gres, or ask those who run the cluster for gres.conf"
    )


def _words_after(log: str, mark: str) -> list[str]:
    """The words that the program printed after ``mark``."""
    line = next((line for line in log.splitlines() if mark in line), "")
    return line.partition(mark)[2].split()
