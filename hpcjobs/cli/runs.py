"""``hpcjobs rerun``, ``diff``, ``archive`` and ``prune``: runs that have ended."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import hpcjobs
from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.completion import complete_jobs, complete_states
from hpcjobs.cli.options import EPILOG, SbatchCommand, job_flags, with_job_options
from hpcjobs.cli.output import DryRun, JobSite, Json, OneJob, note, opt, print_output, print_table
from hpcjobs.cli.terminal import exit_on_signals
from hpcjobs.errors import RequestError
from hpcjobs.job.models import JobSpec
from hpcjobs.remote.connection import record_output
from hpcjobs.units import format_count, human_bytes, human_duration, memory_bytes, walltime_s

if TYPE_CHECKING:
    from hpcjobs.run.rerun import Change

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def diff(
    first: OneJob,
    second: Annotated[str, typer.Argument(help="The other run.", autocompletion=complete_jobs)],
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Show the differences between two runs: settings, environment, image, code, script, nodes, results."""
    from hpcjobs.run.rerun import compare_runs
    from hpcjobs.run.select import select_one
    from hpcjobs.run.status import statuses

    entries = [select_one(name, site=site) for name in (first, second)]
    difference = compare_runs(*statuses(entries))
    ids = [entry.named_id for entry in entries]
    if as_json:
        print_output("diff", difference)
        return
    if difference.is_empty:
        print(f"no difference between {ids[0]} and {ids[1]}")
        return
    print(f"{ids[0]} -> {ids[1]}")
    for section in ("settings", "environment", "image", "code", "nodes", "results"):
        rows: tuple[Change, ...] = getattr(difference, section)
        if rows:
            print(f"{section}:")
        for row in rows:
            print(f"  {describe_change(row)}")
    if difference.script:
        print("script:")
    for line in difference.script:
        print(f"  {line}")


def describe_change(change: Change) -> str:
    """``time: 01:00:00 -> 02:00:00``; of a text of several lines that it differs."""
    values = [_one_line(value) for value in (change.first, change.second)]
    return f"{change.name}: {values[0]} -> {values[1]}"


def _one_line(value: str | None) -> str:
    if not value:
        return "-"
    if value.isprintable():
        return value
    lines = value.count("\n") + 1
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in value)
    return text if lines == 1 else f"({lines} lines)"


@app.command(cls=SbatchCommand, epilog=EPILOG)
@with_job_options(only=job_flags())
def rerun(
    *,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="Id, run folder or name of the run to repeat.", autocompletion=complete_jobs
        ),
    ],
    site: JobSite = None,
    request: JobSpec,
    dry_run: DryRun = False,
    trust: Annotated[
        bool, opt("--trust", help="Submit also what somebody else's run folder says; read --dry-run first.")
    ] = False,
    wait: Annotated[bool, opt("--wait", help="Wait for the end; exit code of the job.")] = False,
    follow: Annotated[
        bool, opt("--follow", "-f", help="Print the log while the job runs, then end as --wait does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a run again from its manifest, unchanged or with the changes that options make."""
    from hpcjobs.cli.submit import LOG_OR_JSON, print_notes, print_plan, report
    from hpcjobs.run.job_files import read_job_manifest
    from hpcjobs.run.rerun import job_changes, plan_rerun, refusal_of_run
    from hpcjobs.run.select import select_one

    if follow and as_json:
        raise CommandLineError(LOG_OR_JSON)
    entry = select_one(job, site=site)
    again = plan_rerun(entry, request, made_by=shlex.join(["hpcjobs", *sys.argv[1:]]), trusts=trust)
    for text in again.notes:
        note(text)
    for change in job_changes(read_job_manifest(Path(entry.run_dir)).job, again.plan.job):
        note(f"changed: {describe_change(change)}")
    print_notes(again.plan.job)
    if dry_run or again.plan.job.untrusted:
        print_plan(again.plan, as_json=as_json)
        if not dry_run:
            raise refusal_of_run(Path(entry.run_dir))
        return
    handle = hpcjobs.submit(again.plan)
    report(handle, again.plan, as_json=as_json)
    if wait or follow:
        from hpcjobs.cli.follow import follow_to_end, wait_for

        raise typer.Exit(follow_to_end(handle) if follow else wait_for([handle.entry]))


@app.command()
def archive(
    job: Annotated[str, typer.Argument(help="Id, run folder or name.", autocompletion=complete_jobs)],
    output: Annotated[Path | None, opt(help="File to write [NAME_ID.tar]; .tar.gz and .tar.xz are compressed.")] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Write the run folder of a job that has ended to one tar file, with the checksum of every file."""
    from hpcjobs.run.archive import archive
    from hpcjobs.run.select import select_one

    exit_on_signals()
    entry = select_one(job, site=site)
    written = archive(entry, output)
    record_output(written.path)
    if as_json:
        print_output("archive", {"path": str(written.path), "files": written.files, "size_bytes": written.size})
    else:
        files = format_count(written.files, "file")
        print(f"{written.path}  {files}, {human_bytes(written.size)}; sha256sum -c SHA256SUMS checks it")


_ZERO = re.compile(r"0+(\.0+)?[smhdw]?")


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option(help="Jobs that ended at least this long ago: 30d, 12h; 0s is all that have ended.")
    ] = "30d",
    state: Annotated[
        list[str] | None, opt("--state", help="Only jobs in this state: FAILED …", autocompletion=complete_states)
    ] = None,
    larger_than: Annotated[str | None, opt(help="Only run folders of this size or more: 1G.")] = None,
    remove: Annotated[bool, opt("--remove", help="Remove what is listed.")] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """List old run folders and records of jobs; with --remove, remove them.

    A job is never removed while it waits, runs or has no known end. Sweeps keep the folders that their results need.
    """
    from hpcjobs.cli.jobs import parse_states
    from hpcjobs.run import archive as old_jobs

    try:
        age_s = 0 if _ZERO.fullmatch(older_than) else walltime_s(older_than)
    except ValueError as error:
        hint = "write 30d, 12h or 2w; 0s means every job that has ended"
        raise RequestError(f"--older-than {older_than}: not a time", hint=hint) from error
    try:
        min_size = 0 if larger_than is None else memory_bytes(larger_than)
    except ValueError as error:
        raise RequestError(f"--larger-than {larger_than}: not a size", hint="write 1G or 500M") from error
    choice = old_jobs.select_old(age_s=age_s, states=parse_states(state or []), min_size=min_size, site=site)
    chosen = old_jobs.remove(choice.old) if remove else choice.old
    total = sum(job.size for job in chosen)
    if as_json:
        rows = [
            {"job_id": job.entry.job_id, "name": job.entry.name, "states": job.states, "ended": job.ended,
             "size_bytes": job.size, "run_dir": job.entry.run_dir} for job in chosen
        ]  # fmt: skip
        print_output("prune", {"jobs": rows, "removed": remove, "size_bytes": total, "left": choice.left})
    elif chosen:
        print_table(
            ["JOB", "NAME", "STATE", "AGE", "SIZE", "RUN FOLDER"],
            [
                (job.entry.job_id, job.entry.name, ",".join(s.value for s in job.states) or "-",
                 human_duration(time.time() - job.ended), human_bytes(job.size), job.entry.run_dir)
                for job in chosen
            ],
        )  # fmt: skip
    done = "removed" if remove else "to remove (--remove does it)"
    if not as_json:
        print(f"{len(chosen)} job{'' if len(chosen) == 1 else 's'}, {human_bytes(total)} {done}")
    if choice.left and not as_json:
        jobs = "job" if choice.left == 1 else "jobs"
        note(
            f"not listed: {choice.left} {jobs} of that age, "
            "still waiting, running or ending, in use, or without a known end"
        )
    if len(chosen) < len(choice.old):
        raise typer.Exit(1)  # a warning has named the folder that could not be removed
