"""``hpcjobs rerun`` and ``diff``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.job_options import job_flags, with_job_options
from hpcjobs.cli.options import EPILOG, SbatchCommand
from hpcjobs.cli.output import JobSite, Json, note, print_output
from hpcjobs.job.models import JobSpec

if TYPE_CHECKING:
    from hpcjobs.run.difference import Change, Difference


app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    second: Annotated[str, typer.Argument(help="The other run.", autocompletion=complete_jobs)],
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Show the differences between two runs: settings, environment, image, code, script, nodes, results."""
    from hpcjobs.run.difference import compare_runs
    from hpcjobs.run.select import select
    from hpcjobs.run.status import statuses

    entries = [select([name], site=site)[0] for name in (first, second)]
    difference = compare_runs(*statuses(entries))
    if as_json:
        print_output("diff", difference)
        return
    _print(difference, (entries[0].job_id, entries[1].job_id))


def _print(difference: Difference, ids: tuple[str, str]) -> None:
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted; write nothing.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Submit also what somebody else's run folder says; read --dry-run first.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end; exit code of the job.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print the log while the job runs, then end as --wait does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Submit a run again from its manifest, unchanged or with the changes that options make."""
    import hpcjobs
    from hpcjobs.cli.submit import print_notes, print_plan, report
    from hpcjobs.run.difference import job_changes
    from hpcjobs.run.rerun import plan_rerun, read_manifest, refusal_of_run
    from hpcjobs.run.select import select_one

    entry = select_one(job, site=site)
    again = plan_rerun(entry, request, made_by=shlex.join(["hpcjobs", *sys.argv[1:]]), trusts=trust)
    for text in again.notes:
        note(text)
    for change in job_changes(read_manifest(Path(entry.run_dir)).job, again.plan.job):
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
        from hpcjobs.cli.wait import follow_to_end, wait_for

        raise typer.Exit(follow_to_end(handle) if follow else wait_for([handle.entry]))
