"""``hpcjobs monitor``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, note
from hpcjobs.cli.signals import exit_on_signals

if TYPE_CHECKING:
    from hpcjobs.run.samples import NodeSample
    from hpcjobs.site.models import Site

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def monitor(
    job: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    interval: Annotated[float, typer.Option(min=1, max=300, help="Seconds between two samples.", metavar="S")] = 5.0,
    cancel_idle: Annotated[
        str | None,
        typer.Option(help="Cancel the job once all its nodes are idle for this long: 30m.", show_default=False),
    ] = None,
    site: JobSite = None,
) -> None:
    """Sample the load of a running job's nodes, whatever its program is, and print it with alarms until the job ends.

    One overlapping step with a task per node writes the samples to monitor.jsonl in the run folder. Ctrl-C ends the
    sampling, not the job. If the job is already sampled, for instance by its trainer, its samples are only printed. A
    job that was submitted without hpcjobs is named by its id.
    """
    from hpcjobs.errors import RequestError, UnknownJobError
    from hpcjobs.run.cancel import cancel
    from hpcjobs.run.monitor import JobSampling
    from hpcjobs.run.select import select
    from hpcjobs.units import walltime_s

    try:
        idle_limit_s = None if cancel_idle is None else walltime_s(cancel_idle)
    except ValueError as error:
        raise RequestError(f"--cancel-idle {cancel_idle}: not a time", hint="write 30m or 2h") from error
    exit_on_signals()
    try:
        (entry,) = select([job], site=site)
    except UnknownJobError:
        where = _slurm_site(site)
        if where is None or not re.fullmatch(r"\d+(?:_\d+)?", job):
            raise
        _watch_foreign(job, where, interval, idle_limit_s)
        return
    with JobSampling(entry, interval_s=interval, report=note) as sampling:
        idle = _IdleLimit(idle_limit_s, lambda: sampling.nodes, interval, partial(cancel, [entry]))
        _watch(entry.job_id, sampling.follow(), idle)


def _watch_foreign(job: str, site: Site, interval_s: float, idle_limit_s: float | None) -> None:
    """Sample a job that was submitted by other means, of which Slurm knows the nodes."""
    from hpcjobs.errors import HpcJobsError
    from hpcjobs.run.monitor import find_foreign, follow_sampler, read_error, start_foreign_sampler, stop
    from hpcjobs.scheduler.connect import connect

    foreign = find_foreign(job, site)
    sampler = start_foreign_sampler(foreign, interval_s=interval_s)
    try:
        note(f"job {job} was not submitted with hpcjobs: its samples go to {foreign.folder}")
        cancel = partial(connect("slurm", foreign.slurm_conf).cancel, [job])
        idle = _IdleLimit(idle_limit_s, lambda: len(foreign.nodes), interval_s, cancel)
        if not _watch(job, follow_sampler(foreign, sampler), idle) and (reason := read_error(sampler)) is not None:
            raise HpcJobsError(f"the sampler of job {job} ended: {reason}")
    finally:
        stop(sampler)


class _IdleLimit(NamedTuple):
    """When a job is cancelled for doing nothing, and how."""

    limit_s: float | None
    """None: never."""
    count_nodes: Callable[[], int]
    """So many must have a fresh sample: what the others do is not known."""
    interval_s: float
    cancel: Callable[[], object]


def _slurm_site(site: str | None) -> Site | None:
    """The site whose Slurm may know a job that was submitted by other means."""
    from hpcjobs.run.listing import site_asked

    where = site_asked(site)
    return where if where is not None and where.scheduler == "slurm" else None


def _watch(job_id: str, newest: Iterable[list[NodeSample]], idle: _IdleLimit) -> bool:
    """Print samples and new alarms until there are no more; cancel the job that is idle for too long.

    Whether there was a sample.
    """
    from hpcjobs.run.alarms import find_alarms, idle_s
    from hpcjobs.run.monitor import FRESH_S
    from hpcjobs.units import human_duration

    known: set[tuple[str, str]] = set()
    printed: dict[str, float] = {}
    began, warned = time.time(), False
    for latest in newest:
        nodes = [node for node in latest if node.taken >= began - FRESH_S]  # not those of an earlier attempt
        for node in nodes:
            if printed.get(node.host) != node.taken:
                printed[node.host] = node.taken
                when = time.strftime("%H:%M:%S", time.localtime(node.taken))
                print(f"{node.host}  {when}  {node.sample}", flush=True)
        alarms = find_alarms(nodes)
        for alarm in alarms:
            if alarm[:2] not in known:
                print(f"alarm: {alarm.text}", flush=True)
        known = {alarm[:2] for alarm in alarms}
        if idle.limit_s is None:
            continue
        unknown = [node.host for node in nodes if node.sample.idle_s is None]
        if unknown and not warned:
            reason = "its GPUs cannot be read, or a trainer takes its samples"
            note(f"--cancel-idle has no effect: how long {', '.join(unknown)} is idle is not known ({reason})")
            warned = True
        fresh = [node for node in nodes if time.time() - node.taken < max(FRESH_S, 3 * idle.interval_s)]
        idle_for_s = idle_s(fresh, expected=idle.count_nodes())
        if idle_for_s is not None and idle_for_s >= idle.limit_s:
            idle.cancel()
            print(f"cancelled {job_id}: all its nodes idle for {human_duration(idle_for_s)}", flush=True)
            break
    return bool(printed)
