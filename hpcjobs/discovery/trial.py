"""A small real job per partition and launcher, and one with a GPU where there are some, by the same way as any job."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from hpcjobs.discovery.compare import SiteFinding
from hpcjobs.errors import HpcJobsError
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.job.plan import plan
from hpcjobs.run.handle import JobHandle
from hpcjobs.run.submit import submit
from hpcjobs.scheduler.base import State
from hpcjobs.site.models import Resources, Site

_MARK = "hpcjobs-check-interfaces"
_MARK_OF_GPUS = "hpcjobs-check-gpus"
_GPUS_OF_TASK = "${CUDA_VISIBLE_DEVICES-}${ROCR_VISIBLE_DEVICES-}${ZE_AFFINITY_MASK-}"
_PROGRAM = ("sh", "-c", f"echo {_MARK} $(ls /sys/class/net); echo {_MARK_OF_GPUS} {_GPUS_OF_TASK}")
_LINES = 3


class Trial(NamedTuple):
    """One trial job, or the reason why there is none."""

    subject: str
    handle: JobHandle | None
    refusal: str = ""
    gpus: int = 0


def start_trials(site: Site, name: str, *, time: str, without: Collection[str] = ()) -> list[Trial]:
    """Submit one job to each partition by each launcher that the file names (else by the site's default one).

    The job asks for a GPU where every node of the partition has some. Partitions of ``without`` get none.
    """
    launchers: tuple[str | None, ...] = site.launchers or (None,)
    tried = [partition for partition in site.partitions if partition not in without]
    return [_start(site, name, partition, launcher, time) for partition in tried for launcher in launchers]


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
        return Trial(subject, submit(planned), gpus=gpus)
    except HpcJobsError as error:
        return Trial(subject, None, " ".join(error.message.split()))


def finish_trials(trials: list[Trial], site: Site, *, timeout_s: float) -> Iterator[SiteFinding]:
    """What became of each job; one that has not ended in time is cancelled."""
    for trial in trials:
        if trial.handle is None:
            yield SiteFinding(trial.subject, "wrong", trial.refusal, "what the message names")
            continue
        try:
            trial.handle.wait(timeout_s=timeout_s)
        except TimeoutError:
            reasons = {record.reason or record.state.value for record in trial.handle.records}
            trial.handle.cancel()
            text = f"job {trial.handle.id} had not ended after {timeout_s:.0f} s: {', '.join(sorted(reasons))}"
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
