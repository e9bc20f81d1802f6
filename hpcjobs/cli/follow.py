"""``hpcjobs logs``, ``wait``, ``top`` and ``monitor``, and how jobs failed for other commands that wait."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobOrNewest, JobSite, Json, OneJob, note, opt, print_output, shows_colours
from hpcjobs.cli.progress import ProgressBars
from hpcjobs.cli.terminal import exit_on_signals, write_document
from hpcjobs.diagnosis.log import last_lines
from hpcjobs.errors import HpcJobsError, HpcJobsWarning, RequestError, UnknownJobError, reason_of
from hpcjobs.run import logs as job_logs
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import (
    covers_tasks,
    has_reader,
    output_dir,
    own_ids,
    read_attempts,
    read_figures,
    read_problems,
    read_state,
    task_dir,
)
from hpcjobs.run.listing import was_pruned
from hpcjobs.run.logs import Selection, follow, path_of
from hpcjobs.run.progress import (
    FigureRow,
    NodeSample,
    all_monitor_files,
    describe_sample,
    find_alarms,
    follow_samples,
    job_progress,
    job_staging,
    samples,
)
from hpcjobs.run.select import is_never_met, newest, select, select_one
from hpcjobs.run.status import Known, kept_or_written, statuses
from hpcjobs.run.wait import exit_code
from hpcjobs.run.wait import wait as wait_for_ends
from hpcjobs.scheduler.base import JobRecord, State, describe_exit
from hpcjobs.scheduler_kind import CLUSTER
from hpcjobs.units import format_count, human_duration, walltime_s

if TYPE_CHECKING:
    from hpcjobs.run.steps import IdleLimit
    from hpcjobs.run.submit import JobHandle
    from hpcjobs.site.models import Site

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def logs(
    job: JobOrNewest = None,
    follow: Annotated[
        bool, opt("--follow", "-f", help="Print new lines until the job ends, requeues included.")
    ] = False,
    count: Annotated[
        int | None, opt("--tail", "-n", min=0, help="Only the last N lines; of an array, of each task.", metavar="N")
    ] = None,
    since: Annotated[str | None, opt(help="Lines of the last 10m, 2h … (of programs that print times).")] = None,
    rank: Annotated[int | None, opt(min=0, help="Only this rank's lines.")] = None,
    node: Annotated[str | None, opt(help="Only lines of ranks on this node (of the newest attempt).")] = None,
    grep: Annotated[str | None, opt(help="Only lines that this regular expression matches.")] = None,
    merge: Annotated[bool, opt("--merge", help="Print equal lines of several ranks once: '0-7: text'.")] = False,
    timestamps: Annotated[bool, opt("--timestamps", "-t", help="With -f, print the time of each new line.")] = False,
    stderr: Annotated[bool, typer.Option("--stderr", hidden=True)] = False,
    monitor: Annotated[
        bool, opt("--monitor", help="Print the load of the nodes (submit --monitor), not the log.")
    ] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Print the output of a job, with the rank before each line if there are several; also which rank failed first."""
    _check(stderr=stderr, timestamps=timestamps, follow=follow)
    selection = _selection(count=count, since=since, rank=rank, node=node, grep=grep, merge=merge)
    entry = select_one(job, site=site, foreign=True) if job is not None else newest(site=site)
    if was_pruned(entry):
        raise UnknownJobError(f"job {entry.named_id}: its run folder, with its log, was removed by prune")
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
    if not job_logs.existing_paths(entry) and not follow:
        records = statuses([entry], errors=[])[0].records if entry.is_foreign else kept_or_written(entry)
        has_ended = covers_tasks(entry, records) and all(record.state.ended for record in records)
        what = "printed nothing" if has_ended else "has printed nothing yet"
        note(f"job {entry.job_id} {what} ({job_logs.paths(entry)[0]})")
        return
    colours = shows_colours(sys.stdout) and job_logs.has_labels(entry)
    printed = _print_lines(map(_colour_rank, chosen) if colours else chosen, flush=follow)
    if not printed and selection._replace(merges=False) != job_logs.ALL and count != 0:
        options = {"--since": since, "--rank": rank, "--node": node, "--grep": grep}
        arguments = " ".join(f"{option} {value}" for option, value in options.items() if value is not None)
        note(f"job {entry.job_id} has no line for {arguments or '-n'} ({job_logs.paths(entry)[0]})")


def _check(*, stderr: bool, timestamps: bool, follow: bool) -> None:
    """Refuse options that a log cannot answer."""
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
    """The options as values. Raises RequestError: one of them cannot be read, or two exclude each other."""
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


_RANK = re.compile(r"(?P<before>(?:\S*T\S+ | {20,})?(?:\[\d+\] )?)(?P<label> *0*(?P<rank>\d{1,6}):)(?= )")
"""Prefix of a line: a time, an array task's number, the rank."""
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
    if chooses_lines:
        message = "--monitor is about nodes; -n, --since, --rank, --node, --grep, --merge, -t are about the log"
        raise RequestError(message, hint="leave them out, or --monitor")
    if not follow and not as_json and not all_monitor_files(entry):
        note(f"job {entry.job_id} has no samples: a trainer takes them with --monitor, as soon as it trains")
        return
    source = follow_samples(entry, report=note) if follow else samples(entry)
    if as_json:
        files = [str(path) for path in all_monitor_files(entry)]
        print_output("logs", {"job_id": entry.job_id, "files": files, "lines": list(source)})
        return
    _print_lines(source, flush=follow)


LINES = 10
"""So many lines of the rank that failed first are printed."""
_MOST_FAILURES = 20
"""Jobs and tasks that are described one by one."""


def _print_failures(jobs: Iterable[Known], *, print_states: Callable[[list[JobRecord]], None]) -> None:
    """Print how failed jobs ended; for the first one also its last lines and the command that explains it.

    Beyond 20 jobs the rest is counted by state; jobs of unknown state come last. ``print_states`` prints the ends that
    have no line yet.
    """
    failed = [(job.entry, record) for job in jobs for record in job.records if record.state is not State.COMPLETED]
    failed.sort(key=lambda job: job[1].state is State.UNKNOWN)
    for number, (entry, record) in enumerate(failed[:_MOST_FAILURES]):
        if is_never_met(record):
            note(f"job {record.job_id} will not start: its dependency can never be satisfied")
            note(f"next: hpcjobs cancel {record.job_id} removes it from the queue")
            continue
        ended, who = read_state(entry, record.job_id), ""
        # Ranks of a cancelled job did not fail.
        first = None if ended is None or record.state is State.CANCELLED else ended.first_failure
        if first is not None:
            end = describe_exit(first.exit_code)
            who = f"first failure: rank {first.rank} on {first.host}{'' if end in record.ending else f', {end}'}"
        print_states([record])
        if who:
            note(f"job {record.job_id} {who}")
        past = read_attempts(task_dir(Path(entry.run_dir), record.job_id))
        if past and past[-1].decision.startswith("ended"):
            note(f"job {record.job_id} after {format_count(len(past), 'attempt')} {past[-1].decision}")
        has_begun = record.started is not None or record.state is not State.CANCELLED
        if has_begun and (log := path_of(entry, record.job_id)) is not None:
            if number == 0 and record.state is not State.CANCELLED:
                _print_last_lines(log, first.rank if first is not None else None)
            note(f"log {log}")
        if number == 0:
            note(f"next: hpcjobs why {record.job_id.partition('_[')[0]}")
    if rest := Counter(record.state.value for _, record in failed[_MOST_FAILURES:]):
        note(f"and {', '.join(f'{count:,} {state}' for state, count in rest.items())}; hpcjobs ps -a lists them")


def _describe_ending(record: JobRecord) -> str:
    return "" if record.state is State.COMPLETED else "".join(f", {fact}" for fact in record.ending)


def print_figures(jobs: Iterable[Known]) -> None:
    """Print the figures of merit from the logs of ended jobs, and the problems with reading them."""
    ended = [(job.entry, record) for job in jobs for record in job.records if record.state is not State.UNKNOWN]
    for entry, record in ended[:_MOST_FAILURES]:
        folder = output_dir(Path(entry.run_dir), record.job_id)
        if not has_reader(folder):
            continue
        figures = [str(FigureRow(name, one.value, one.unit)) for name, one in read_figures(folder).items()]
        for line in [*([", ".join(figures)] if figures else []), *read_problems(folder)]:
            note(f"job {record.job_id}: {line}")


def _print_last_lines(log: Path, rank: int | None) -> None:
    try:
        lines = last_lines(log, rank, LINES)
    except FileNotFoundError:
        return  # no output yet
    except OSError as error:
        warnings.warn(f"{log} cannot be read: {reason_of(error)}", HpcJobsWarning, stacklevel=2)
        return
    if lines:
        note(f"last lines of rank {rank}:" if rank is not None else "last lines:")
    for line in lines:
        note(f"  {line}")


PROGRESS_S = 60.0
"""Seconds between two progress lines of running jobs."""
_BAR_S = 1.0
"""Between two looks at the steps of running jobs for their bars."""
_MOST_BARS = 8
_TIMES = "write 90 (seconds), 1m or 2h"


@app.command()
def wait(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(help="Ids, ranges, run folders or names [newest].", autocompletion=complete_jobs),
    ] = None,
    timeout: Annotated[str | None, opt(help="Stop waiting after this time: 90 (seconds), 1m, 2h.")] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Wait for jobs to end. The exit code is the job's: 0 if all completed, else the first that is not 0."""
    timeout_s = None if timeout is None else _seconds(timeout)
    entries = select(jobs, site=site, foreign=True) if jobs else [newest(site=site)]
    raise typer.Exit(wait_for(entries, timeout_s=timeout_s, as_json=as_json))


def _seconds(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``1m`` or ``2h``."""
    try:
        seconds = float(text)
        if seconds >= 0:  # neither negative nor NaN
            return seconds
    except ValueError:
        try:
            return float(walltime_s(text))
        except ValueError as error:
            raise RequestError(f"--timeout {text}: not a time", hint=_TIMES) from error
    raise RequestError(f"--timeout {text}: must not be negative", hint=_TIMES)


def wait_for(entries: list[Entry], *, timeout_s: float | None = None, as_json: bool = False) -> int:
    """Wait with a line on standard error at every change; the exit code."""

    with explaining_interrupts(entries), ProgressBars() as bars:
        changes = _Changes(entries, bars)
        try:
            known = wait_for_ends(entries, timeout_s=timeout_s, progress=changes.show, report=note)
        except TimeoutError as error:
            if as_json:
                print_output("wait", [record for job in statuses(entries) for record in job.records])
            raise HpcJobsError(str(error)) from error
        records = [record for job in known for record in job.records]
        changes.print_states([record for record in records if record.state is State.COMPLETED])
    if as_json:
        print_output("wait", records)
    _print_failures(known, print_states=changes.print_states)
    print_figures(known)
    return exit_code(known)


@contextmanager
def explaining_interrupts(entries: list[Entry]) -> Iterator[None]:
    """On Ctrl-C, print that the jobs continue, and the command that ends them."""
    try:
        yield
    except KeyboardInterrupt:
        ids = " ".join(entry.named_id for entry in entries)
        goes = "job {} continues" if len(entries) == 1 else "jobs {} continue"
        note(f"stopped waiting; {goes.format(ids)}: `hpcjobs wait {ids}` waits again, `hpcjobs cancel {ids}` cancels")
        raise


class _Changes:
    """Prints each change of state once, and the progress of running jobs that write metrics."""

    def __init__(
        self, entries: list[Entry], bars: ProgressBars, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._printed: dict[str, str] = {}
        self._entries, self._bars, self._clock = entries, bars, clock
        self._pause_s = _BAR_S if bars.are_drawn else PROGRESS_S
        self._next_progress = clock() + self._pause_s

    def show(self, records: list[JobRecord]) -> None:
        """Print changes since the last look. COMPLETING is not printed: the end is next."""
        self.print_states([record for record in records if record.state.value != "COMPLETING"])
        if self._clock() >= self._next_progress:
            self._next_progress = self._clock() + self._pause_s
            self._show_progress()

    def _show_progress(self) -> None:
        ids = [(entry, job_id) for entry in self._entries for job_id in own_ids(entry)]
        running = [(entry, job_id) for entry, job_id in ids if self._printed.get(job_id) == State.RUNNING.value]
        for entry, job_id in running[:_MOST_BARS] if self._bars.are_drawn else running:
            staging, title = job_staging(entry.run_dir, job_id), f"job {job_id} data"
            if staging is not None:
                self._bars.show(title, staging.size_bytes, staging.total_bytes or None, text=str(staging))
                continue
            self._bars.remove(title)
            progress = job_progress(entry.run_dir, job_id)
            if progress is not None:
                self._bars.show(
                    f"job {job_id}",
                    progress.step.step or 0,
                    progress.total_steps,
                    text=progress.step.describe(progress.of_total),
                    remaining_s=progress.remaining_s,
                )

    def print_states(self, records: list[JobRecord]) -> None:
        """Print a line for each job with a new state."""
        for record in records:
            if self._printed.get(record.job_id) != (state := record.state.value + _describe_ending(record)):
                self._printed[record.job_id] = state
                where = f" on {record.node_list}" if record.node_list else ""
                reason = f" ({record.reason})" if record.reason and not where else ""
                note(f"job {record.job_id} {record.state.value}{where}{reason}{_describe_ending(record)}")
                if record.state.ended:
                    self._bars.remove(f"job {record.job_id}")


def follow_to_end(handle: JobHandle) -> int:
    """Print the log as it comes; the job's exit code."""
    with explaining_interrupts([handle.entry]):
        for line in follow(handle.entry, report=note):
            print(line, end="", flush=True)
    return wait_for([handle.entry])


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
    job: OneJob,
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
        if where is None or not where.kind.runs_steps or not re.fullmatch(r"\d+(?:[_+]\d+)?", job):
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
        cancel = partial(connect(CLUSTER, foreign.slurm_conf).cancel, [job])
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
