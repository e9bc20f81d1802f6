"""``hpcjobs top`` and ``monitor``."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, note, opt
from hpcjobs.cli.terminal import exit_on_signals
from hpcjobs.errors import HpcJobsError, RequestError, UnknownJobError
from hpcjobs.units import human_duration, walltime_s

if TYPE_CHECKING:
    from hpcjobs.run.progress import NodeSample
    from hpcjobs.run.steps import IdleLimit
    from hpcjobs.site.models import Site

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def top(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Ids, ranges, names, run folders, or a folder of run folders [mine of the last day].",
            autocompletion=complete_jobs,
        ),
    ] = None,
    site: JobSite = None,
) -> None:
    """Watch jobs on a screen: progress, loss, load of the nodes. Keys show logs and causes, cancel jobs, open a shell.

    The scheduler is queried once for all jobs, every 5 seconds, or up to every 60 seconds while nothing changes. Of
    other users' jobs only the run folders are read, if their permissions allow it.
    """
    if find_spec("textual") is None:
        raise HpcJobsError("the screen needs the package textual", hint="pip install 'hpcjobs[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RequestError(
            "hpcjobs top needs a terminal", hint="hpcjobs ps prints the jobs; hpcjobs ps --watch repeats it"
        )
    from hpcjobs.run.listing import scheduler_of, site_asked
    from hpcjobs.top.look import Looker, RealActions, select_watched
    from hpcjobs.top.screen import TopScreen

    looker = Looker(select_watched(jobs or [], site=site), site=site)
    _, slurm_conf = scheduler_of(site_asked(site))
    screen = TopScreen(looker, looker.look(), RealActions(slurm_conf=slurm_conf))
    error = screen.run()
    if screen.ended_by is not None:  # the terminal is restored: end as a program without a screen does
        os.kill(os.getpid(), screen.ended_by)
    if error is not None:
        raise error


@app.command()
def monitor(
    job: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    interval: Annotated[float, typer.Option(min=1, max=300, help="Seconds between two samples.", metavar="S")] = 5.0,
    cancel_idle: Annotated[
        str | None, opt(help="Cancel the job once all its nodes are idle for this long: 30m.")
    ] = None,
    site: JobSite = None,
) -> None:
    """Sample the load of a running job's nodes, whatever its program is, and print it with alarms until the job ends.

    One overlapping step with a task per node writes the samples to monitor.jsonl in the run folder. Ctrl-C ends the
    sampling, not the job. If the job is already sampled, for instance by its trainer, its samples are only printed. A
    job that was submitted without hpcjobs is named by its id.
    """
    from hpcjobs.run.control import cancel
    from hpcjobs.run.listing import site_asked
    from hpcjobs.run.select import select_one
    from hpcjobs.run.steps import JobSampling

    try:
        limit_s = None if cancel_idle is None else walltime_s(cancel_idle)
    except ValueError as error:
        raise RequestError(f"--cancel-idle {cancel_idle}: not a time", hint="write 30m or 2h") from error
    exit_on_signals()
    try:
        entry = select_one(job, site=site)
    except UnknownJobError:
        where = site_asked(site)
        if where is None or not where.kind.runs_steps or not re.fullmatch(r"\d+(?:_\d+)?", job):
            raise
        _watch_foreign(job, where, interval, limit_s)
        return
    with JobSampling(entry, interval_s=interval, report=note) as sampling:
        limit = _idle_limit(limit_s, interval, lambda: sampling.nodes)
        _watch(entry.job_id, sampling.follow(), limit, partial(cancel, [entry]))


def _watch_foreign(job: str, site: Site, interval_s: float, limit_s: float | None) -> None:
    """Sample a job that was submitted by other means; Slurm knows its nodes."""
    from hpcjobs.run.steps import find_foreign, follow_sampler, read_error, start_foreign_sampler, stop
    from hpcjobs.scheduler.base import connect

    foreign = find_foreign(job, site)
    sampler = start_foreign_sampler(foreign, interval_s=interval_s)
    try:
        note(f"job {job} was not submitted with hpcjobs: its samples go to {foreign.folder}")
        cancel = partial(connect("slurm", foreign.slurm_conf).cancel, [job])
        limit = _idle_limit(limit_s, interval_s, lambda: len(foreign.nodes))
        sampled = _watch(job, follow_sampler(foreign, sampler), limit, cancel)
        if not sampled and (reason := read_error(sampler.process)) is not None:
            raise HpcJobsError(f"the sampler of job {job} ended: {reason}")
    finally:
        stop(sampler.process)


def _idle_limit(limit_s: float | None, interval_s: float, count_nodes: Callable[[], int]) -> IdleLimit | None:
    from hpcjobs.run.steps import IdleLimit

    return None if limit_s is None else IdleLimit(limit_s, interval_s=interval_s, count_nodes=count_nodes, report=note)


def _watch(
    job_id: str, newest: Iterable[list[NodeSample]], limit: IdleLimit | None, cancel: Callable[[], object]
) -> bool:
    """Print samples and new alarms until the last one; cancel the job if it is idle for too long.

    Returns whether there was a sample.
    """
    from hpcjobs.run.progress import describe_sample, find_alarms

    known: set[tuple[str, str]] = set()
    printed: dict[str, float] = {}
    for nodes in newest:
        for node in nodes:
            if printed.get(node.host) != node.taken:
                printed[node.host] = node.taken
                when = time.strftime("%H:%M:%S", time.localtime(node.taken))
                print(f"{node.host}  {when}  {describe_sample(node.sample)}", flush=True)
        alarms = find_alarms(nodes)
        for alarm in alarms:
            if alarm[:2] not in known:
                print(f"alarm: {alarm.text}", flush=True)
        known = {alarm[:2] for alarm in alarms}
        idle_s = None if limit is None else limit.exceeded_s(nodes)
        if idle_s is not None:
            cancel()
            print(f"cancelled {job_id}: all its nodes idle for {human_duration(idle_s)}", flush=True)
            break
    return bool(printed)
