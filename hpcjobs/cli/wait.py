"""``hpcjobs wait``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, note, print_output
from hpcjobs.cli.progress import ProgressBars

if TYPE_CHECKING:
    from hpcjobs.run.handle import JobHandle
    from hpcjobs.run.index import Entry
    from hpcjobs.scheduler.base import JobRecord

PROGRESS_S = 60.0
"""Between two lines that say how far running jobs have come."""
_BAR_S = 1.0
"""Between two looks at the steps of running jobs for their bars."""
_MOST_BARS = 8
_TIMES = "write 90 (seconds), 1m or 2h"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def wait(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(help="Ids, ranges, run folders or names [newest].", autocompletion=complete_jobs),
    ] = None,
    timeout: Annotated[
        str | None, typer.Option(help="Stop waiting after this time: 90 (seconds), 1m, 2h.", show_default=False)
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Wait for jobs to end. The exit code is the job's: 0 if all completed, else the first that is not 0."""
    from hpcjobs.run.select import newest, select

    timeout_s = None if timeout is None else _seconds(timeout)
    entries = select(jobs, site=site, foreign=True) if jobs else [newest(site=site)]
    raise typer.Exit(wait_for(entries, timeout_s=timeout_s, as_json=as_json))


def _seconds(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``1m`` or ``2h``."""
    from hpcjobs.errors import RequestError
    from hpcjobs.units import walltime_s

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
    from hpcjobs.cli.failures import print_failures
    from hpcjobs.errors import HpcJobsError
    from hpcjobs.run.status import statuses
    from hpcjobs.run.wait import exit_code, wait

    with explaining_interrupts(entries), ProgressBars() as bars:
        changes = _Changes(entries, bars)
        try:
            known = wait(entries, timeout_s=timeout_s, progress=changes.show, report=note)
        except TimeoutError as error:
            if as_json:
                print_output("wait", [record for job in statuses(entries) for record in job.records])
            raise HpcJobsError(str(error)) from error
        records = [record for job in known for record in job.records]
        changes.print_states(records)
    if as_json:
        print_output("wait", records)
    print_failures(known)
    return exit_code(known)


@contextmanager
def explaining_interrupts(entries: list[Entry]) -> Iterator[None]:
    """On Ctrl-C, say that the jobs go on and how to end them."""
    try:
        yield
    except KeyboardInterrupt:
        ids = " ".join(entry.job_id if entry.task is None else f"{entry.job_id}_{entry.task}" for entry in entries)
        goes = "job {} continues" if len(entries) == 1 else "jobs {} continue"
        note(f"stopped waiting; {goes.format(ids)}: `hpcjobs wait {ids}` waits again, `hpcjobs cancel {ids}` cancels")
        raise


class _Changes:
    """Prints once what each job has become, and shows how far those are that run and write metrics."""

    def __init__(
        self, entries: list[Entry], bars: ProgressBars, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._printed_states: dict[str, object] = {}
        self._entries, self._bars, self._clock = entries, bars, clock
        self._pause_s = _BAR_S if bars.are_drawn else PROGRESS_S
        self._next_progress = clock() + self._pause_s

    def show(self, records: list[JobRecord]) -> None:
        """Print what is new at one look. Not that a job was cancelled: it may have met its limit; only Slurm knows."""
        self.print_states([record for record in records if record.state.value != "CANCELLED"])
        if self._clock() >= self._next_progress:
            self._next_progress = self._clock() + self._pause_s
            self._show_progress()

    def _show_progress(self) -> None:
        from hpcjobs.run.progress import job_progress, job_staging
        from hpcjobs.run.state_file import own_ids
        from hpcjobs.scheduler.base import State

        ids = [(entry, job_id) for entry in self._entries for job_id in own_ids(entry)]
        running = [(entry, job_id) for entry, job_id in ids if self._printed_states.get(job_id) is State.RUNNING]
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
                    progress.step.step,
                    progress.total_steps,
                    text=progress.step.describe(progress.of_total),
                    remaining_s=progress.remaining_s,
                )

    def print_states(self, records: list[JobRecord]) -> None:
        """Print a line for each job whose state has changed."""
        for record in records:
            if self._printed_states.get(record.job_id) is not record.state:
                self._printed_states[record.job_id] = record.state
                where = f" on {record.node_list}" if record.node_list else ""
                reason = f" ({record.reason})" if record.reason and not where else ""
                note(f"job {record.job_id} {record.state.value}{where}{reason}")
                if record.state.ended:
                    self._bars.remove(f"job {record.job_id}")


def follow_to_end(handle: JobHandle) -> int:
    """Print the log as it comes; the job's exit code."""
    from hpcjobs.run.logs import follow

    with explaining_interrupts([handle.entry]):
        for line in follow(handle.entry, report=note):
            print(line, end="", flush=True)
    return wait_for([handle.entry])
