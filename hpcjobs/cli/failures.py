"""Prints how jobs failed, for commands that wait for jobs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from hpcjobs.cli.output import note
from hpcjobs.diagnosis.log import last_lines
from hpcjobs.errors import HpcJobsWarning, reason_of
from hpcjobs.run.attempts import read_attempts
from hpcjobs.run.dependency import is_never_met
from hpcjobs.run.folder import task_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.logs import path_of
from hpcjobs.run.state_file import FirstFailure, read_state
from hpcjobs.run.status import Known
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.exit_text import describe_exit
from hpcjobs.units import format_count

LINES = 10
"""So many lines of the rank that failed first are printed."""


def print_failures(jobs: Iterable[Known]) -> None:
    """How each job that did not complete ended; of the first one the last lines, and what explains it."""
    failed = [(job.entry, record) for job in jobs for record in job.records if record.state is not State.COMPLETED]
    for number, (entry, record) in enumerate(failed):
        if is_never_met(record):
            note(f"job {record.job_id} will not start: its dependency can never be satisfied")
            note(f"next: hpcjobs cancel {record.job_id} removes it from the queue")
            continue
        first = _first_failure(entry, record)
        who = ""
        if first is not None:
            end = describe_exit(first.exit_code)
            who = f"; first failure: rank {first.rank} on {first.host}{'' if end in record.ending else f', {end}'}"
        note(f"job {record.job_id} {', '.join([record.state.value, *record.ending])}{who}")
        past = read_attempts(task_dir(Path(entry.run_dir), record.job_id))
        if past and past[-1].decision.startswith("ended"):
            note(f"job {record.job_id} after {format_count(len(past), 'attempt')} {past[-1].decision}")
        log = path_of(entry, record.job_id)
        if number == 0 and record.state is not State.CANCELLED:
            _print_last_lines(log, first.rank if first is not None else None)
        note(f"log {log}")
        if number == 0:
            note(f"next: hpcjobs why {record.job_id}")


def _first_failure(entry: Entry, record: JobRecord) -> FirstFailure | None:
    """What the job recorded, unless its ranks only ended with a job that was cancelled."""
    state = read_state(entry, record.job_id)
    return state.first_failure if state is not None and record.state is not State.CANCELLED else None


def _print_last_lines(log: Path, rank: int | None) -> None:
    try:
        lines = last_lines(log, rank, LINES)
    except FileNotFoundError:
        return  # the job printed nothing
    except OSError as error:
        warnings.warn(f"{log} cannot be read: {reason_of(error)}", HpcJobsWarning, stacklevel=2)
        return
    if lines:
        note(f"last lines of rank {rank}:" if rank is not None else "last lines:")
    for line in lines:
        note(f"  {line}")
