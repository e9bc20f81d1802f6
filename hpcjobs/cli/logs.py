"""``hpcjobs logs``."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, note, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcjobs.run.index import Entry
    from hpcjobs.run.logs import Selection

app = typer.Typer(rich_markup_mode=None)


@app.command()
def logs(
    job: Annotated[
        str | None, typer.Argument(help="Id, array task, run folder or name [newest].", autocompletion=complete_jobs)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the job ends, requeues included.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option("-n", min=0, help="The last N lines, of an array of each task.", metavar="N", show_default=False),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="What follows the last line with an older time: 10m, 2h.", show_default=False)
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's lines.", show_default=False)] = None,
    node: Annotated[
        str | None, typer.Option(help="Only lines of ranks on this node (of the newest attempt).", show_default=False)
    ] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines that this regular expression matches.", show_default=False)
    ] = None,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="What a trainer with --monitor measured of its nodes, not the log.")
    ] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Print what a job printed, and which rank failed first."""
    from hpcjobs.run import logs as job_logs
    from hpcjobs.run.select import newest, select

    selection = _selection(count=count, since=since, rank=rank, node=node, grep=grep)
    entry = select([job], site=site)[0] if job is not None else newest(site=site)
    if monitor:
        _print_samples(entry, follow=follow, selection=selection, as_json=as_json)
        return
    chosen = (
        job_logs.follow(entry, selection=selection, report=note)
        if follow
        else job_logs.lines(entry, selection=selection)
    )
    if as_json:
        print_json({"job_id": entry.job_id, "files": [str(p) for p in job_logs.paths(entry)], "lines": list(chosen)})
        return
    if not any(map(os.path.lexists, job_logs.paths(entry))) and not follow:
        note(f"job {entry.job_id} has printed nothing yet ({job_logs.paths(entry)[0]})")
        return
    if not _print_lines(chosen, flush=follow) and selection != job_logs.ALL and count != 0:
        options = {"--since": since, "--rank": rank, "--node": node, "--grep": grep}
        words = " ".join(f"{option} {value}" for option, value in options.items() if value is not None)
        note(f"job {entry.job_id} has no line for {words or '-n'} ({job_logs.paths(entry)[0]})")


def _selection(
    *, count: int | None, since: str | None, rank: int | None, node: str | None, grep: str | None
) -> Selection:
    """The options as values.

    Raises:
        RequestError: one of them cannot be read, or two exclude each other.
    """
    from hpcjobs.errors import RequestError
    from hpcjobs.run.logs import Selection
    from hpcjobs.units import walltime_s

    if rank is not None and node is not None:
        raise RequestError("--node and --rank exclude each other", hint="a rank runs on one node: leave --node out")
    try:
        moment = None if since is None else time.time() - walltime_s(since)
    except ValueError as error:
        raise RequestError(f"--since {since}: {error}", hint="write 10m or 2h") from error
    try:
        pattern = None if grep is None else re.compile(grep)
    except (re.error, OverflowError) as error:
        hint = "write a backslash before a character that stands for itself: \\[ \\( \\*"
        raise RequestError(f"--grep {grep}: no regular expression: {error}", hint=hint) from error
    return Selection(rank=rank, node=node, pattern=pattern, last=count, since=moment)


def _print_lines(source: Iterable[str], *, flush: bool) -> int:
    """Print ``source`` as it comes; the number of its lines."""
    count = 0
    try:
        for count, line in enumerate(source, 1):  # noqa: B007 # the last one is the number of them
            print(line, end="", flush=flush)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return count


def _print_samples(entry: Entry, *, follow: bool, selection: Selection, as_json: bool) -> None:
    """Print the lines of monitor.jsonl for people; ``as_json`` prints where they are."""
    from hpcjobs.errors import RequestError
    from hpcjobs.run.logs import ALL
    from hpcjobs.run.progress import all_monitor_files, follow_samples, samples

    if selection != ALL:
        message = "--monitor is about nodes; -n, --since, --rank, --node and --grep are about lines of the log"
        raise RequestError(message, hint="leave them out, or --monitor")
    if not follow and not all_monitor_files(entry):
        note(f"job {entry.job_id} has no samples: a trainer takes them with --monitor, as soon as it trains")
        return
    source = follow_samples(entry, report=note) if follow else samples(entry)
    if as_json:
        files = [str(path) for path in all_monitor_files(entry)]
        print_json({"job_id": entry.job_id, "files": files, "lines": list(source)})
        return
    _print_lines(source, flush=follow)
