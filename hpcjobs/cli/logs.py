"""``hpcjobs logs``."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, note, print_output, shows_colours
from hpcjobs.cli.terminal import write_document

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpcjobs.run.index import Entry
    from hpcjobs.run.logs import Selection

app = typer.Typer(rich_markup_mode=None, add_completion=False)


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
        typer.Option(
            "--tail",
            "-n",
            min=0,
            help="Only the last N lines; of an array, of each task.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Lines of the last 10m, 2h … (of programs that print times).", show_default=False)
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's lines.", show_default=False)] = None,
    node: Annotated[
        str | None, typer.Option(help="Only lines of ranks on this node (of the newest attempt).", show_default=False)
    ] = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines that this regular expression matches.", show_default=False)
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Print equal lines of several ranks once: '0-7: text'.")
    ] = False,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="With -f, print the time of each new line.")
    ] = False,
    stderr: Annotated[bool, typer.Option("--stderr", hidden=True)] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Print the load of the nodes (submit --monitor), not the log.")
    ] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Print the output of a job, with the rank before each line if there are several; also which rank failed first."""
    from hpcjobs.run import logs as job_logs
    from hpcjobs.run.select import newest, select

    _check(stderr=stderr, timestamps=timestamps, follow=follow)
    selection = _selection(count=count, since=since, rank=rank, node=node, grep=grep, merge=merge)
    entry = select([job], site=site, foreign=True)[0] if job is not None else newest(site=site)
    if monitor:
        _print_samples(entry, follow=follow, chooses_lines=selection != job_logs.ALL or timestamps, as_json=as_json)
        return
    chosen = (
        job_logs.follow(entry, selection=selection, timestamps=timestamps, report=note)
        if follow
        else job_logs.lines(entry, selection=selection)
    )
    if as_json:
        print_output(
            "logs", {"job_id": entry.job_id, "files": [str(p) for p in job_logs.paths(entry)], "lines": list(chosen)}
        )
        return
    if not any(map(os.path.lexists, job_logs.paths(entry))) and not follow:
        note(f"job {entry.job_id} has printed nothing yet ({job_logs.paths(entry)[0]})")
        return
    colours = shows_colours(sys.stdout) and job_logs.has_labels(entry)
    printed = _print_lines(map(_colour_rank, chosen) if colours else chosen, flush=follow)
    if not printed and selection._replace(merges=False) != job_logs.ALL and count != 0:
        options = {"--since": since, "--rank": rank, "--node": node, "--grep": grep}
        arguments = " ".join(f"{option} {value}" for option, value in options.items() if value is not None)
        note(f"job {entry.job_id} has no line for {arguments or '-n'} ({job_logs.paths(entry)[0]})")


def _check(*, stderr: bool, timestamps: bool, follow: bool) -> None:
    """Refuse what a log cannot tell."""
    from hpcjobs.errors import RequestError

    if stderr:
        raise RequestError(
            "--stderr: a log holds standard output and standard error, and not which line is of which",
            hint="`hpcjobs why JOB` prints a failure's own lines, --grep chooses lines; to separate them, submit "
            "`bash -c 'exec PROGRAM 2>\"$HPCJOBS_RUN_DIR/stderr-$RANK.txt\"'`",
        )
    if timestamps and not follow:
        raise RequestError(
            "--timestamps: a log does not hold the times of its lines",
            hint="with -f, the time at which each line comes is printed; --since reads times that the program prints",
        )


def _selection(
    *, count: int | None, since: str | None, rank: int | None, node: str | None, grep: str | None, merge: bool
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
        raise RequestError(f"--since {since}: not a time", hint="write 10m or 2h") from error
    try:
        pattern = None if grep is None else re.compile(grep)
    except (re.error, OverflowError) as error:
        hint = "write a backslash before a character that stands for itself: \\[ \\( \\*"
        raise RequestError(f"--grep {grep}: no regular expression: {error}", hint=hint) from error
    if merge and rank is not None:
        raise RequestError("--merge and --rank exclude each other", hint="one rank has nothing to merge")
    return Selection(rank=rank, node=node, pattern=pattern, last=count, since=moment, merges=merge)


_RANK = re.compile(r"(?P<before>(?:\S*T\S+ | {20,})?(?:\[\d+\] )?)(?P<label> *(?P<rank>\d+):)(?= )")
"""What stands before a line: a time, an array task's number, the rank."""
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
"""Of SGR, for ranks in turn; red is left to errors."""


def _colour_rank(line: str) -> str:
    label = _RANK.match(line)
    if label is None:
        return line
    colour = _COLOURS[int(label["rank"]) % len(_COLOURS)]
    return f"{label['before']}\x1b[{colour}m{label['label']}\x1b[0m{line[label.end() :]}"


def _print_lines(source: Iterable[str], *, flush: bool) -> int:
    """Print ``source`` as it comes; the number of its lines."""
    count = 0
    try:
        for count, line in enumerate(source, 1):  # noqa: B007 # the last one is the number of them
            write_document(line)
            if flush:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return count


def _print_samples(entry: Entry, *, follow: bool, chooses_lines: bool, as_json: bool) -> None:
    """Print the lines of monitor.jsonl for people; ``as_json`` prints where they are."""
    from hpcjobs.errors import RequestError
    from hpcjobs.run.samples import all_monitor_files, follow_samples, samples

    if chooses_lines:
        message = "--monitor is about nodes; -n, --since, --rank, --node, --grep, --merge, -t are about the log"
        raise RequestError(message, hint="leave them out, or --monitor")
    if not follow and not all_monitor_files(entry):
        note(f"job {entry.job_id} has no samples: a trainer takes them with --monitor, as soon as it trains")
        return
    source = follow_samples(entry, report=note) if follow else samples(entry)
    if as_json:
        files = [str(path) for path in all_monitor_files(entry)]
        print_output("logs", {"job_id": entry.job_id, "files": files, "lines": list(source)})
        return
    _print_lines(source, flush=follow)
