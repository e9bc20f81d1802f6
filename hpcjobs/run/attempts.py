"""The attempts of a job that is started again, and the job that continues it."""

from __future__ import annotations

import warnings
from pathlib import Path

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.record.attempts import Attempt, read_history
from hpcjobs.record.control import Continuation, ControlDir
from hpcjobs.record.names import ATTEMPTS
from hpcjobs.run.index import Entry


def read_attempts(run_dir: Path) -> list[Attempt]:
    """The attempts, oldest first; none for a job without ``--retries``. Lines that cannot be read are left out."""
    try:
        return read_history(str(run_dir)).attempts
    except NotADirectoryError:
        return []
    except OSError as error:
        warnings.warn(f"{run_dir / ATTEMPTS} cannot be read: {error.strerror}", HpcJobsWarning, stacklevel=2)
        return []


def continuation(entry: Entry) -> Continuation:
    """The job that ``entry`` is now, and when it was submitted."""
    first = Continuation(entry.job_id, entry.submitted)
    if entry.array is not None:
        return first
    return ControlDir(entry.run_dir).continuation() or first


def write_continuation(entry: Entry, job: Continuation) -> None:
    """Record that ``job`` continues ``entry``; a folder that cannot be written gives a warning."""
    control = ControlDir(entry.run_dir)
    try:
        control.write_continued(job.job_id, job.submitted)
    except OSError as error:
        warnings.warn(
            f"{error.filename or control.path} cannot be written: {error.strerror}", HpcJobsWarning, stacklevel=2
        )


def current_id(entry: Entry) -> str:
    """The scheduler's id of the job that carries ``entry`` on."""
    return continuation(entry).job_id
