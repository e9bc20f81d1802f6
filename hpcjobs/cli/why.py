"""``hpcjobs why`` and ``where``: why a job failed or waits, and where it would start."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.options import EPILOG, ProgramCommand, with_job_options
from hpcjobs.cli.output import AnySite, JobSite, Json, SpecFile, opt, print_output, print_table
from hpcjobs.errors import RequestError, UnknownJobError, reason_of
from hpcjobs.job.models import JobSpec
from hpcjobs.units import format_number, human_duration

if TYPE_CHECKING:
    from hpcjobs.diagnosis.gather import Subject
    from hpcjobs.diagnosis.placement import Ahead, Cost, Pending, Placement
    from hpcjobs.diagnosis.values import Diagnosis
    from hpcjobs.job.models import Layer
    from hpcjobs.run.index import Entry
    from hpcjobs.scheduler.base import JobRecord

app = typer.Typer(rich_markup_mode=None, add_completion=False)


_AT_ONCE_S = 60.0


def print_placements(rows: Sequence[Placement]) -> None:
    """One line per partition, the best one first."""
    headers = ["SITE", "PARTITION", "VALID", "NODES", "TIME", "START", "COST AT MOST", "REMARK"]
    print_table(headers, [_cells(row) for row in rows])


def _cells(row: Placement) -> list[str]:
    return [
        row.site,
        row.partition or "-",
        "yes" if row.is_valid else "no",
        str(row.nodes) if row.nodes is not None else "-",
        row.time or "-",
        describe_start(row.start),
        _cost(row.cost),
        row.remark or "",
    ]


def describe_start(start: float | None) -> str:
    """``at once``, ``in 2h05m``; ``-`` where it is not known."""
    if start is None:
        return "-"
    seconds = start - time.time()
    return "at once" if seconds < _AT_ONCE_S else f"in {human_duration(seconds)}"


def _cost(cost: Cost | None) -> str:
    if cost is None:
        return "-"
    amount = f", {format_number(cost.amount)} {cost.currency}" if cost.amount is not None else ""
    attempt = " per attempt" if cost.per_attempt else ""
    return f"{format_number(cost.node_hours)} node hours{amount}{attempt}"


_SHOWN = 5
"""So many jobs ahead are listed."""


def print_pending(pending: Pending) -> None:
    """Print the reason, the jobs ahead, placements that would start sooner, and commands to try."""
    name = f"  {pending.name}" if pending.name else ""
    print(f"job {pending.job_id}{name}: {pending.state} ({pending.reason or 'no reason yet'})")
    print(f"reason: {pending.text}")
    if pending.start_estimate is not None:
        remark = f" ({pending.start_remark})" if pending.start_remark else ""
        print(f"Slurm expects it to start {describe_start(pending.start_estimate)}{remark}")
    for awaited in pending.awaited:
        print(f"waits for job {awaited.job_id} ({awaited.condition}): {awaited.state or 'no longer known to Slurm'}")
    _print_jobs("ahead in the queue", pending.waiting_before)
    _print_jobs("running there, next to end first", pending.running)
    if pending.sooner:
        print("would start sooner:")
        print_placements(pending.sooner[:_SHOWN])
    for fix in pending.fix:
        print(f"try: {fix}")


def _print_jobs(title: str, jobs: tuple[Ahead, ...]) -> None:
    if not jobs:
        return
    print(f"{title}: {len(jobs)}")
    for job in jobs[:_SHOWN]:
        left = f", at most {human_duration(job.time_left_s)} left" if job.time_left_s and job.state == "RUNNING" else ""
        nodes = f"{'?' if job.nodes is None else job.nodes} node{'' if job.nodes == 1 else 's'}"
        print(f"  {job.job_id} of {job.user}, {nodes}{left}")


@app.command()
def why(
    job: Annotated[
        str | None,
        typer.Argument(
            help="Id (of any Slurm job), array task, run folder or name [newest].", autocompletion=complete_jobs
        ),
    ] = None,
    log: Annotated[Path | None, opt(help="Read this log file; JOB may then be left out.")] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Explain why a job failed (cause, evidence, first rank and host, what to do), or why it is pending."""
    from hpcjobs.diagnosis.failed import diagnose

    subject = _subject(job, log, site)
    state = subject.record.state if subject.record is not None else None
    if state is not None and (not state.ended or state.value == "COMPLETED"):
        _print_unfinished(subject, as_json=as_json)
        return
    diagnosis = diagnose(subject.facts, subject.lines)
    if as_json:
        print_output("why", diagnosis)
    else:
        print_diagnosis(diagnosis)


def _subject(job: str | None, log: Path | None, site: str | None) -> Subject:
    from hpcjobs.diagnosis.gather import gather_entry, gather_foreign, gather_log
    from hpcjobs.run.listing import scheduler_of, site_asked
    from hpcjobs.run.select import newest, select_one

    if log is not None:
        try:
            alone = gather_log(log)
        except OSError as error:
            raise RequestError(f"--log {log} cannot be read: {reason_of(error)}") from error
        if job is None:
            return alone
    if job is None:
        return gather_entry(newest(site=site))
    named = None
    try:
        entry = select_one(job, site=site, foreign=True)
        if not entry.is_foreign:
            return gather_entry(entry, log=log)
        if entry.name == job:
            job, named = entry.job_id, entry
    except UnknownJobError as error:
        if not re.fullmatch(r"\d+(?:[_+]\d+)?", job):
            if os.path.isfile(job):
                raise UnknownJobError(error.message, hint=f"`hpcjobs why --log {quote(job)}` explains a log") from error
            raise
    return gather_foreign(job, entry=named, slurm_conf=scheduler_of(site_asked(site))[1], log=log)


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """The diagnosis for people: cause, place, line, evidence, fix."""
    if diagnosis.job_id is not None:
        print(f"job {diagnosis.job_id}" + (f"  {diagnosis.name}" if diagnosis.name else "") + f": {diagnosis.state}")
    likely = "" if diagnosis.certain else ", likely"
    print(f"cause: {diagnosis.text}" + (f"  [{diagnosis.cause}{likely}]" if diagnosis.cause is not None else ""))
    place = [f"rank {diagnosis.rank}"] if diagnosis.rank is not None else []
    place += [f"on {diagnosis.host}"] if diagnosis.host else []
    if place:
        print(f"first failure: {' '.join(place)}")
    if diagnosis.line is not None:
        print(f"line: {diagnosis.line.text.strip()}")
    print("evidence:" if diagnosis.evidence else "evidence: none")
    for fact in diagnosis.evidence:
        print(f"  {fact.source}: {fact.text}")
    if diagnosis.tail:
        print("last lines:")
        for line in diagnosis.tail:
            print(f"  {line}")
    for fix in diagnosis.fix:
        print(f"try: {fix}")
    for path in diagnosis.logs:
        print(f"log {path}")


def _print_unfinished(subject: Subject, *, as_json: bool) -> None:
    """A job that has not failed."""
    record = subject.record
    assert record is not None
    if record.state.value == "PENDING" and (subject.entry is None or subject.entry.kind.has_partitions):
        from hpcjobs.diagnosis.placement import explain_pending
        from hpcjobs.run.select import is_own

        entry = subject.entry if subject.entry is not None and is_own(subject.entry) else None
        pending = explain_pending(record, entry=entry, slurm_conf=subject.slurm_conf)
        if as_json:
            print_output("why, of a job that waits", pending)
        else:
            print_pending(pending)
        return
    if as_json:
        print_output("why, of a job that has not failed", record)
        return
    reason = f" ({record.reason})" if record.reason else ""
    outcome = "it has not failed"
    if record.state.value == "UNKNOWN":
        from hpcjobs.run.status import is_of_another_user, owner_elsewhere

        owner = None if subject.entry is None else owner_elsewhere(subject.entry)
        outcome = "the scheduler does not know it, and it wrote no end"
        if owner is not None and subject.entry is not None:
            outcome = "that user can ask" if is_of_another_user(subject.entry) else f"`hpcjobs why` on {owner} knows"
    print(f"job {record.job_id} {record.state.value}{reason}: {outcome}")
    if subject.entry is not None:
        from hpcjobs.run.progress import job_progress

        progress = job_progress(subject.entry.run_dir, record.job_id)
        if progress is not None and progress.step.has_diverged:
            print(f"warning: {progress.step.loss_text} (metrics.jsonl)")
    if record.state.value == "RUNNING" and subject.entry is not None:
        _print_alarms(subject.entry, record)


def _print_alarms(entry: Entry, record: JobRecord) -> None:
    """Print alarms of the newest samples of its nodes, if the job is sampled."""
    from hpcjobs.run.job_files import output_dir
    from hpcjobs.run.progress import current_samples, find_alarms, newest_samples

    for alarm in find_alarms(current_samples(newest_samples(output_dir(Path(entry.run_dir), record.job_id)), record)):
        print(f"alarm: {alarm.text}")


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options()
def where(
    *,
    site: AnySite = None,
    request: JobSpec,
    spec: SpecFile = None,
    as_json: Json = False,
) -> None:
    """Show for each site and partition whether PROGRAM fits, when it would start, and what it costs at most."""
    from hpcjobs.diagnosis.placement import find_placements
    from hpcjobs.job.project import with_project
    from hpcjobs.site.library import known_sites, load_site

    layers: Sequence[Layer] | Path = spec or ()
    if spec is None:
        request, layers = with_project(request)
    sites = [load_site(site)] if site is not None else known_sites()
    rows = find_placements(request, sites, spec=layers)
    if as_json:
        print_output("where", rows)
    else:
        print_placements(rows)
    if not any(row.is_valid for row in rows):
        raise typer.Exit(5)
