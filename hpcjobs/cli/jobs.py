"""``hpcjobs ps`` and ``show``; ``cancel``, ``hold``, ``release``, ``requeue`` and ``update``, which change jobs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.completion import complete_jobs, complete_settings, complete_states
from hpcjobs.cli.output import (
    JobOrNewest,
    Jobs,
    JobSite,
    Json,
    OneJob,
    note,
    opt,
    print_output,
    print_table,
    table_width,
)
from hpcjobs.cli.terminal import raw
from hpcjobs.errors import RequestError, UnknownJobError, nearest
from hpcjobs.run.job_files import own_ids
from hpcjobs.run.listing import RECENT_S, ListedJob, Listing, listing, select_unfinished, was_pruned
from hpcjobs.run.logs import paths
from hpcjobs.run.progress import Description, describe, describe_sample, find_alarms, job_progress
from hpcjobs.run.select import is_own, newest, select, select_one
from hpcjobs.run.status import job_keys
from hpcjobs.scheduler.base import State, choose_colour
from hpcjobs.top.rows import Group, Task, fold, make_row
from hpcjobs.top.text import COLUMNS
from hpcjobs.units import clock, human_bytes, human_duration, walltime_s

if TYPE_CHECKING:
    from hpcjobs.run.control import Verb

app = typer.Typer(rich_markup_mode=None, add_completion=False)


_COLUMNS = tuple(column for column in COLUMNS if column.ps is not None)
_SHRINK = ("REASON", "NAME", "NODES")
_SHRUNK_WIDTH = 10
_GAP = 3
"""Characters between two columns."""


class Line(NamedTuple):
    """One line of the table, and the state that its colour shows."""

    cells: tuple[str, ...]
    state: State


def make_lines(rows: Iterable[ListedJob], *, tasks: bool) -> list[Line]:
    """Return the lines for ``rows``; the tasks of an array are one line, or one each with ``tasks``."""
    if tasks:
        return [_line([row]) for row in rows]
    all_rows = list(rows)
    keys = job_keys([row.record for row in all_rows])
    groups = groupby(zip(all_rows, keys, strict=True), key=lambda pair: _job_of(*pair))
    return [_line([row for row, _ in group]) for _, group in groups]


def _job_of(row: ListedJob, key: tuple[str, str, int]) -> tuple[str, str | tuple[str, str, int]]:
    """All rows of a run folder are one job's; those of a heterogeneous job have a line each."""
    return _id_of(row), row.run_dir or key


def _id_of(row: ListedJob) -> str:
    return row.record.job_id.split("_")[0]


def _line(rows: Sequence[ListedJob]) -> Line:
    job, first = _id_of(rows[0]), rows[0]
    group = Group(job, job, first.name or "", first.site, first.run_dir)
    tasks = [Task(group, row.record, None) for row in rows]
    if len(rows) == 1 and first.record.state is State.RUNNING:
        tasks = [tasks[0]._replace(progress=job_progress(first.run_dir, first.record.job_id))]
    row = fold(tasks) if len(tasks) > 1 else make_row(tasks[0])
    return Line(tuple(column.ps(row, 0.0) or column.blank for column in _COLUMNS if column.ps is not None), row.state)


def print_lines(lines: Sequence[Line], *, folders: bool) -> None:
    """Print the table, as wide as the terminal at most; ``folders`` adds run folders, which no width cuts."""
    titles = [column.title for column in _COLUMNS]
    all_cells = _without_empty([titles, *(line.cells for line in lines)], "PROGRESS")
    table = [cells if folders else cells[:-1] for cells in all_cells]
    headers, *cut = table if folders else _fit(table, table_width())
    state = headers.index("STATE")
    print_table(headers, cut, styles=[{state: choose_colour(line.state)} for line in lines])


def _without_empty(table: Sequence[Sequence[str]], header: str) -> list[Sequence[str]]:
    """Return the table without the column ``header`` if all its cells are empty."""
    n = list(table[0]).index(header)
    if any(row[n] for row in table[1:]):
        return list(table)
    return [[*row[:n], *row[n + 1 :]] for row in table]


def _fit(table: Sequence[Sequence[str]], width: int) -> list[Sequence[str]]:
    """Return the table no wider than ``width``: long texts cut, then columns omitted; never the job and its state."""
    from rich.cells import cell_len, set_cell_size

    headers = list(table[0])
    widths = {name: max(cell_len(row[n]) for row in table) for n, name in enumerate(headers)}

    def excess() -> int:
        return sum(widths.values()) + _GAP * (len(widths) - 1) - width

    for name in _SHRINK:
        if excess() > 0 and widths[name] > _SHRUNK_WIDTH:
            widths[name] = max(_SHRUNK_WIDTH, widths[name] - excess())
    for column in sorted(_COLUMNS, key=lambda column: column.drop):
        if excess() > 0 and column.drop and column.title in widths:
            del widths[column.title]

    def cut(text: str, room: int) -> str:
        return text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"

    columns = [(headers.index(name), room) for name, room in widths.items()]
    return [[cut(row[n], room) for n, room in columns] for row in table]


_WATCH_S = 10.0
"""Between two tables of --watch: each costs the scheduler one query."""


_MORE = "hpcjobs ps -a lists older ones, and jobs of sbatch that have ended"


@app.command()
def ps(
    everything: Annotated[bool, opt("--all", "-a", help="All jobs, not only those of the last day.")] = False,
    since: Annotated[str | None, opt(help="Jobs submitted at most this long ago: 2h, 7d [1d].")] = None,
    state: Annotated[
        list[str] | None, opt("--state", help="Jobs in this state: RUNNING, PENDING …", autocompletion=complete_states)
    ] = None,
    name: Annotated[str | None, opt("--name", "-J", help="Jobs of this name.")] = None,
    count: Annotated[int | None, opt("-n", min=1, help="The newest N lines.", metavar="N")] = None,
    wide: Annotated[bool, opt("--wide", help="Show run folders on a terminal too.")] = False,
    tasks: Annotated[bool, opt("--tasks", help="A line for each task of an array.")] = False,
    watch: Annotated[bool, opt("--watch", help="Print the table again every 10 seconds, until Ctrl-C.")] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """List my jobs of the last day and all that have not ended.

    Jobs submitted without hpcjobs are listed until they end; with --all or --since also those that have ended.
    """

    states = parse_states(state or [])
    if watch and as_json:
        raise RequestError("--watch and --json exclude each other", hint="leave one of them out")

    def look() -> Listing:
        rows, errors = listing(
            since=_first_moment(since, everything=everything),
            site=site,
            ended_elsewhere=everything or since is not None,
        )
        chosen = [r for r in rows if (not states or r.record.state in states) and (name is None or r.name == name)]
        return Listing(chosen, errors)

    def show(rows: list[ListedJob]) -> None:
        if rows:
            lines = make_lines(rows, tasks=tasks)
            print_lines(lines[-count:] if count is not None else lines, folders=wide or not sys.stdout.isatty())
        elif states or name is not None:
            print("no such jobs" if everything or since else f"no such jobs since yesterday ({_MORE})")
        else:
            print("no jobs" if everything or since else f"no jobs since yesterday ({_MORE})")

    while True:
        jobs = look()
        if watch:
            print("\x1b[H\x1b[2J" if sys.stdout.isatty() else "", end="", file=raw(sys.stdout))
            print(time.strftime("%F %T"))
        if as_json:
            print_output("ps", jobs.rows[-count:] if count is not None else jobs.rows)
        else:
            show(jobs.rows)
        for error in jobs.errors:
            note(str(error))
        if not watch:
            break
        sys.stdout.flush()
        time.sleep(_WATCH_S)
    if jobs.errors:
        raise typer.Exit(jobs.errors[0].exit_code)


def parse_states(names: list[str]) -> set[State]:
    """The states that ``names`` name, each in any case; several may be joined by commas."""

    states = set()
    for name in ",".join(names).upper().split(",") if names else []:
        if name not in State.__members__:
            raise RequestError(f"--state {name}: not a job state", hint=nearest(name, State.__members__))
        states.add(State[name])
    return states


def _first_moment(since: str | None, *, everything: bool) -> float:
    """From when on jobs are listed, in seconds since 1970."""

    if everything:
        return 0.0
    try:
        return time.time() - (RECENT_S if since is None else walltime_s(since))
    except ValueError as error:
        raise RequestError(f"--since {since}: not a time", hint="write 2h or 7d") from error


def _print_results(status: Description) -> None:
    """The numbers of the job's summary; of an own array, how to ask for those of a task: of a copy no id names one."""
    tasks = own_ids(status.entry)
    if len(tasks) > 1 and is_own(status.entry):
        print(f"{len(tasks)} tasks: `hpcjobs show {tasks[0]}` prints the attempts, progress and results of one")
    if status.results:
        print("results:")
    for key, result in status.results.items():
        style = "" if not isinstance(result, float) else ",.0f" if 1000 <= abs(result) < 1e15 else ".4g"
        print(f"  {key}: {result:{style}}")


@app.command()
def show(
    job: JobOrNewest = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Show one job: its state, its settings with the source of each, its results."""
    status = describe(select_one(job, site=site, foreign=True) if job is not None else newest(site=site))
    if as_json:
        print_output("show", status)
        return
    entry = status.entry
    print(f"job {entry.job_id}  {entry.name} on site {entry.site}, submitted {clock(entry.submitted)}")
    for record in status.records:
        facts = [record.state.value]
        if record.node_list:
            facts.append(f"on {record.node_list}")
        if record.elapsed_s is not None:
            facts.append(f"for {human_duration(record.elapsed_s)}")
        facts.extend(record.ending)
        if record.max_rss_bytes:
            facts.append(f"peak memory of a process {human_bytes(record.max_rss_bytes)}")
        print(f"  {record.job_id}: {', '.join(facts)}" + (f" ({record.reason})" if record.reason else ""))
    for number, past in enumerate(status.attempts, 1):
        lost = f", {past.lost} lost" if past.lost else ""
        print(
            f"  attempt {number}: {clock(past.started)} to {clock(past.ended)} on {past.nodes}, "
            f"{past.cause} at step {past.steps}{lost}; {past.decision}"
        )
    if status.first_failure is not None:
        first = status.first_failure
        print(f"  first failure: rank {first.rank} on {first.host}, exit code {first.exit_code}")
    if status.program:
        print(f"program: {status.program}")
    for key, (value, source) in status.settings.items():
        print(f"  {key} = {value}  ({source})")
    if status.code:
        print(f"code: {status.code}")
    if status.step is not None:
        print(f"progress: {status.step}")
    for node in status.monitor:
        age = human_duration(max(0.0, time.time() - node.taken))
        print(f"  {node.host}: {describe_sample(node.sample)}  ({age} ago)")
    for alarm in find_alarms(status.monitor):
        print(f"  alarm: {alarm.text}")
    if status.monitor:
        is_by_id = entry.is_foreign or is_own(entry)
        named = entry.named_id if is_by_id else shlex.quote(entry.run_dir)
        print(f"follow: hpcjobs logs --monitor -f {named}")
    _print_results(status)
    if was_pruned(entry):
        print("run folder removed by prune, with its log")
    elif entry.is_foreign:
        for path in paths(entry):
            print(f"log {path}")
    else:
        print(f"run folder {Path(entry.run_dir)}")


@app.command()
def cancel(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Ids, ranges, run folders or names.", autocompletion=complete_jobs)
    ] = None,
    everything: Annotated[bool, opt("--all", "-a", help="All of my jobs that have not ended.")] = False,
    state: Annotated[
        list[str] | None, opt("--state", help="Only jobs in this state: PENDING …", autocompletion=complete_states)
    ] = None,
    signal: Annotated[str | None, opt(help="Send this signal to the jobs; do not cancel them: USR1.")] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Cancel jobs. A job that has already ended is not an error."""
    from hpcjobs.run.control import cancel

    states = parse_states(state or [])
    if states and not jobs and not everything:
        raise CommandLineError("--state chooses among jobs: add --all, or name jobs")
    if bool(jobs) == everything:
        problem = (
            "JOBS and --all exclude each other" if jobs else "name a job, or use --all; hpcjobs ps lists your jobs"
        )
        raise CommandLineError(problem)
    no_answer = None
    if everything:
        entries, no_answer = select_unfinished(site=site)
        if no_answer is not None and not entries:
            raise no_answer
    else:
        entries = select(jobs or [], site=site, foreign=True)
    if signal is not None:
        from hpcjobs.run.control import signal as send_signal

        ids = send_signal(entries, signal, only=states or ({State.RUNNING} if everything else ()))
        if as_json:
            print_output("cancel --signal", {"signalled": ids})
        else:
            print(f"{signal} sent to {' '.join(ids) or 'no job'}")
        if no_answer is not None:
            raise no_answer
        return
    outcome = cancel(entries, only=states)
    if everything:
        outcome = outcome._replace(ended={}, unknown=[])  # the user did not name them
    if as_json:
        print_output("cancel", outcome)
    else:
        if outcome.cancelled:
            print("cancelled " + " ".join(outcome.cancelled))
        elif everything or state:
            print("nothing to cancel")
        for job_id, ended_state in outcome.ended.items():
            print(f"job {job_id} had ended before: {ended_state.value}")
    if no_answer is not None:
        raise no_answer
    if outcome.unknown:
        raise UnknownJobError(f"nothing cancelled: the scheduler does not know job {', '.join(outcome.unknown)}")


@app.command()
def hold(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Keep pending jobs from starting, until `hpcjobs release`."""
    _control("hold", "held", jobs, site, as_json=as_json)


@app.command()
def release(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Let held jobs start."""
    _control("release", "released", jobs, site, as_json=as_json)


@app.command()
def requeue(jobs: Jobs, site: JobSite = None, as_json: Json = False) -> None:
    """Put running or ended jobs back into the queue: they start again from the beginning, or their last checkpoint."""
    _control("requeue", "requeued", jobs, site, as_json=as_json)


def _control(action: Verb, done: str, jobs: list[str], site: str | None, *, as_json: bool) -> None:
    """Apply ``action`` to the jobs, and print their ids after ``done``."""
    from hpcjobs.run.control import control

    ids = control(action, select(jobs, site=site, foreign=True))
    if as_json:
        print_output(action, {done: ids})
    else:
        print(f"{done} {' '.join(ids)}")


@app.command()
def update(
    job: OneJob,
    settings: Annotated[
        list[str],
        typer.Argument(
            help="NAME=VALUE: time=2h, time=+30m, partition=long, nice=100 …", autocompletion=complete_settings
        ),
    ],
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Change options of a pending or running job, as far as Slurm allows it."""
    from hpcjobs.run.control import update

    entry = select_one(job, site=site, foreign=True)
    arguments = update(entry, settings)
    if as_json:
        print_output("update", {"job_id": entry.named_id, "changed": arguments})
    else:
        print(f"job {entry.named_id}: {' '.join(arguments)}")
