"""The attempts of a job that is started again, as its own script wrote them down."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import read_regular, write_beside
from hpcjobs.run.index import Entry

HISTORY, CONTINUED = "attempts.jsonl", Path("control", "continued")


class Attempt(msgspec.Struct, frozen=True):
    """One start of a job and its end. Times are seconds since 1970; None: not known."""

    job_id: str
    started: float
    ended: float | None
    nodes: str
    exit_code: int | None
    cause: str
    """``completed``, ``timeout``, ``preempt``, ``node`` or ``error``."""
    steps: int
    """Steps done since the very first start."""
    saved: int
    """Of these, what a next attempt would take up."""
    decision: str
    """``requeued``, ``requeued by Slurm``, ``resubmitted as ID``, ``completed``, or ``ended:`` and the reason."""

    @property
    def lost(self) -> int:
        """Steps that were, or would have to be, done again."""
        return 0 if self.cause == "completed" else self.steps - self.saved


def read_attempts(run_dir: Path) -> list[Attempt]:
    """Oldest first; none for a job without ``--retries``. A line that the job was killed over is left out."""
    try:
        lines = read_regular(run_dir / HISTORY).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        warnings.warn(f"{run_dir / HISTORY} cannot be read: {error.strerror}", HpcJobsWarning, stacklevel=2)
        return []
    return [attempt for attempt in map(_read, lines) if attempt is not None]


def _read(line: bytes) -> Attempt | None:
    try:
        return msgspec.json.decode(line, type=Attempt)
    except msgspec.MsgspecError:
        return None


class Continuation(NamedTuple):
    """The scheduler's job that carries an entry on: another one where requeueing is forbidden."""

    job_id: str
    submitted: float


def continuation(entry: Entry) -> Continuation:
    """The job that ``entry`` is now, and when it was submitted."""
    first = Continuation(entry.job_id, entry.submitted)
    if entry.array is not None:
        return first
    path = Path(entry.run_dir) / CONTINUED
    try:
        job_id, *submitted = read_regular(path).decode("ascii").split() or [""]
        return Continuation(job_id, float(submitted[0]) if submitted else path.stat().st_mtime) if job_id else first
    except (OSError, ValueError):
        return first


def write_continuation(entry: Entry, job: Continuation) -> None:
    """Record that ``job`` continues ``entry``; a folder that cannot be written gives a warning."""
    path = Path(entry.run_dir) / CONTINUED
    try:
        write_beside(path, f"{job.job_id} {job.submitted:.0f}\n")
    except OSError as error:
        warnings.warn(f"{path} cannot be written: {error.strerror}", HpcJobsWarning, stacklevel=2)


def current_id(entry: Entry) -> str:
    """The scheduler's id of the job that carries ``entry`` on."""
    return continuation(entry).job_id
