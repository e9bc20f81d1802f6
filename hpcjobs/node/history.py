"""``attempts.jsonl``: a line for each attempt of a job that ended."""

import json
import os
from typing import Any, Dict, List, NamedTuple, Optional

from hpcjobs.files import append_lines, write_beside

NAME = "attempts.jsonl"


class AttemptLine(NamedTuple):
    """One line of attempts.jsonl: one start of a job and its end. Times are seconds since 1970; None: not known."""

    job_id: str
    started: Optional[int]
    ended: Optional[int]
    nodes: str
    exit_code: Optional[int]
    cause: str
    steps: int
    """Steps done since the first start."""
    saved: int
    """Of these, those that a next attempt would resume from."""
    decision: str

    def line(self) -> str:
        return json.dumps(self._asdict(), separators=(",", ":"))


class History(NamedTuple):
    """The attempts of a job so far, oldest first."""

    attempts: List[AttemptLine]
    unreadable: int = 0
    """Lines that hold no attempt: cut short when the job was killed, say."""


def read_history(run_dir: str) -> History:
    """The history in ``run_dir``; empty before the first end.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with open(os.path.join(run_dir, NAME), "rb") as file:
            # Zeros: a file server that crashed may leave them where the newest line was to be.
            lines = [line for line in file.read().split(b"\n") if line.strip(b"\0 \r\t")]
    except FileNotFoundError:
        return History([])
    parsed = [_parse(line) for line in lines]
    attempts = [attempt for attempt in parsed if attempt is not None]
    return History(attempts, len(parsed) - len(attempts))


def append_attempt(run_dir: str, attempt: AttemptLine) -> None:
    """Raises OSError."""
    append_lines(os.path.join(run_dir, NAME), [attempt.line()])


def find_recorded(history: History, job_id: str, started: int) -> Optional[AttemptLine]:
    """The line of the attempt of ``job_id`` that began at ``started``, if it is the last one."""
    last = history.attempts[-1] if history.attempts else None
    return last if last is not None and (last.job_id, last.started) == (job_id, started) else None


def replace_last(run_dir: str, attempt: AttemptLine) -> None:
    """Correct the line that was appended last. Raises OSError."""
    path = os.path.join(run_dir, NAME)
    with open(path, "rb") as file:
        earlier = file.read().rstrip(b"\n").rpartition(b"\n")
    write_beside(path, (earlier[0] + earlier[1]).decode("utf-8", "replace") + attempt.line() + "\n")


def count_unrecorded(history: History, job_id: str, restarts: int) -> int:
    """How many earlier attempts have no readable line, by the number of times the scheduler restarted ``job_id``."""
    recorded = sum(attempt.job_id == job_id for attempt in history.attempts)
    return max(history.unreadable, restarts - recorded, 0)


def _parse(line: bytes) -> Optional[AttemptLine]:
    try:
        values: Dict[str, Any] = json.loads(line.decode("utf-8"))
        attempt = AttemptLine(**{name: values[name] for name in AttemptLine._fields})
        return attempt._replace(steps=int(attempt.steps), saved=int(attempt.saved))
    except (ValueError, KeyError, TypeError):
        return None
