"""``hpcjobs wait``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, note, print_json

if TYPE_CHECKING:
    from hpcjobs.run.handle import JobHandle
    from hpcjobs.run.index import Entry
    from hpcjobs.scheduler.base import JobRecord

app = typer.Typer(rich_markup_mode=None)


@app.command()
def wait(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Ids, ranges, run folders, names [newest].", autocompletion=complete_jobs)
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Stop waiting after this many seconds.", show_default=False)
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Wait for jobs to end. The exit code is the job's: 0 if all completed, else the first that is not 0."""
    from hpcjobs.run.select import newest, select

    raise typer.Exit(
        wait_for(select(jobs, site=site) if jobs else [newest(site=site)], timeout_s=timeout, as_json=as_json)
    )


def wait_for(entries: list[Entry], *, timeout_s: float | None = None, as_json: bool = False) -> int:
    """Wait with a line on standard error at every change; the exit code."""
    from hpcjobs.cli.failures import print_failures
    from hpcjobs.errors import HpcJobsError
    from hpcjobs.run.wait import exit_code, wait

    with _explaining_interrupts(entries):
        try:
            known = wait(entries, timeout_s=timeout_s, progress=_Changes(), report=note)
        except TimeoutError as error:
            raise HpcJobsError(str(error)) from error
    records = [record for job in known for record in job.records]
    if as_json:
        print_json(records)
    print_failures(known)
    return exit_code(known)


@contextmanager
def _explaining_interrupts(entries: list[Entry]) -> Iterator[None]:
    """On Ctrl-C, say that the jobs go on and how to end them."""
    try:
        yield
    except KeyboardInterrupt:
        ids = " ".join(entry.job_id if entry.task is None else f"{entry.job_id}_{entry.task}" for entry in entries)
        goes = "job {} goes on" if len(entries) == 1 else "jobs {} go on"
        note(f"stopped waiting; {goes.format(ids)}: `hpcjobs wait {ids}` waits again, `hpcjobs cancel {ids}` cancels")
        raise


class _Changes:
    """Says once what each job has become."""

    def __init__(self) -> None:
        self._said: dict[str, object] = {}

    def __call__(self, records: list[JobRecord]) -> None:
        for record in records:
            if self._said.get(record.job_id) is not record.state:
                self._said[record.job_id] = record.state
                where = f" on {record.node_list}" if record.node_list else ""
                reason = f" ({record.reason})" if record.reason and not where else ""
                note(f"job {record.job_id} {record.state.value}{where}{reason}")


def follow_to_end(handle: JobHandle) -> int:
    """Print the log as it comes; the job's exit code."""
    from hpcjobs.run.logs import follow

    with _explaining_interrupts([handle.entry]):
        for line in follow(handle.entry, report=note):
            print(line, end="", flush=True)
    return wait_for([handle.entry])
