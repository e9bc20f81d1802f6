"""``hpcjobs logs``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.output import Json, SiteName, note, print_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcjobs.run.index import Entry

app = typer.Typer(rich_markup_mode=None)


@app.command()
def logs(
    job: Annotated[str | None, typer.Argument(help="Id, array task, run folder or name [newest].")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(help="Only this rank's lines.", show_default=False)] = None,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="What a trainer with --monitor measured of its nodes, not the log.")
    ] = False,
    site: SiteName = None,
    as_json: Json = False,
) -> None:
    """Print what a job printed, and which rank failed first."""
    from hpcjobs.run import logs as job_logs
    from hpcjobs.run.select import newest, select

    entry = select([job], site=site)[0] if job is not None else newest(site=site)
    if monitor:
        _print_samples(entry, follow=follow, rank=rank, as_json=as_json)
        return
    source = job_logs.follow(entry, rank=rank, report=note) if follow else job_logs.lines(entry, rank=rank)
    if as_json:
        print_json({"job_id": entry.job_id, "files": [str(p) for p in job_logs.paths(entry)], "lines": list(source)})
        return
    if not any(map(os.path.lexists, job_logs.paths(entry))) and not follow:
        note(f"job {entry.job_id} has printed nothing yet ({job_logs.paths(entry)[0]})")
        return
    if not _print_lines(source, flush=follow) and rank is not None:
        note(f"no line of job {entry.job_id} is from rank {rank} ({job_logs.paths(entry)[0]})")


def _print_lines(source: Iterable[str], *, flush: bool) -> int:
    """Print ``source`` as it comes; the number of its lines."""
    count = 0
    try:
        for count, line in enumerate(source, 1):  # noqa: B007 # the last one is the number of them
            print(line, end="", flush=flush)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return count


def _print_samples(entry: Entry, *, follow: bool, rank: int | None, as_json: bool) -> None:
    """Print the lines of monitor.jsonl for people; ``as_json`` prints where they are."""
    from hpcjobs.errors import RequestError
    from hpcjobs.run.progress import all_monitor_files, follow_samples, samples

    if rank is not None:
        raise RequestError("--monitor is about nodes, and --rank about a rank's lines", hint="leave one of them out")
    if not follow and not all_monitor_files(entry):
        note(f"job {entry.job_id} has no samples: a trainer takes them with --monitor, as soon as it trains")
        return
    source = follow_samples(entry, report=note) if follow else samples(entry)
    if as_json:
        files = [str(path) for path in all_monitor_files(entry)]
        print_json({"job_id": entry.job_id, "files": files, "lines": list(source)})
        return
    _print_lines(source, flush=follow)
