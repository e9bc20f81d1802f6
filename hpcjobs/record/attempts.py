"""``attempts.jsonl``: a line for each attempt of a job that ended."""

import os
from typing import List, NamedTuple, Optional

from hpcjobs.files import append_lines, read_regular, write_beside
from hpcjobs.record.names import ATTEMPTS
from hpcjobs.record.values import decode, encode


class Attempt(NamedTuple):
    """One start of a job and its end. Times are seconds since 1970; None: not known."""

    job_id: str
    started: float
    ended: Optional[float]
    nodes: str
    exit_code: Optional[int]
    cause: str
    """``completed``, ``timeout``, ``preempt``, ``node`` or ``error``."""
    steps: int
    """Steps done since the first start."""
    saved: int
    """Saved steps; the next attempt resumes after them."""
    decision: str
    """``requeued``, ``requeued by Slurm``, ``resubmitted as ID``, ``completed``, or ``ended:`` and the reason."""

    @property
    def lost(self) -> int:
        """Steps that were, or would have to be, done again."""
        return 0 if self.cause == "completed" else self.steps - self.saved


class History(NamedTuple):
    """The recorded attempts of a job, oldest first."""

    attempts: List[Attempt]
    unreadable: int = 0
    """Lines that hold no attempt: cut short when the job was killed, say."""


def read_history(run_dir: str) -> History:
    """The history in ``run_dir``; empty before the first end.

    Raises:
        OSError: it cannot be read.
    """
    try:
        content = read_regular(os.path.join(run_dir, ATTEMPTS))
    except FileNotFoundError:
        return History([])
    # Zeros: a file server that crashed may leave them where the newest line was to be.
    lines = [line for line in content.split(b"\n") if line.strip(b"\0 \r\t")]
    attempts = [attempt for attempt in map(_decode, lines) if attempt is not None]
    return History(attempts, len(lines) - len(attempts))


def append_attempt(run_dir: str, attempt: Attempt) -> None:
    """Append a line. Raises OSError."""
    append_lines(os.path.join(run_dir, ATTEMPTS), [encode(attempt)])


def find_recorded(history: History, job_id: str, started: float) -> Optional[Attempt]:
    """The line of the attempt of ``job_id`` that began at ``started``, if it is the last one."""
    last = history.attempts[-1] if history.attempts else None
    return last if last is not None and (last.job_id, last.started) == (job_id, started) else None


def replace_last(run_dir: str, attempt: Attempt) -> None:
    """Correct the line that was appended last. Raises OSError."""
    path = os.path.join(run_dir, ATTEMPTS)
    earlier = read_regular(path).rstrip(b"\n").rpartition(b"\n")
    write_beside(path, earlier[0] + earlier[1] + encode(attempt).encode() + b"\n")


def count_unrecorded(history: History, job_id: str, restarts: int) -> int:
    """How many earlier attempts have no readable line, by the number of times the scheduler restarted ``job_id``."""
    recorded = sum(attempt.job_id == job_id for attempt in history.attempts)
    return max(history.unreadable, restarts - recorded, 0)


def _decode(line: bytes) -> Optional[Attempt]:
    try:
        return decode(line, Attempt)
    except ValueError:
        return None
