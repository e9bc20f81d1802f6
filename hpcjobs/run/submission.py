"""A submission that a laptop may send twice: its token finds the job of the first time.

The token comes in HPCJOBS_SUBMISSION and is a file in the state folder from before the job is handed over.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread

import msgspec

from hpcjobs.errors import HpcJobsWarning, SchedulerDownError
from hpcjobs.files import state_dir, write_beside
from hpcjobs.run.adopt import UNDECIDED_S, adopt_job
from hpcjobs.run.index import Entry
from hpcjobs.run.record import Submitter, this_process
from hpcjobs.scheduler.base import Scheduler

VARIABLE = "HPCJOBS_SUBMISSION"
_REMEMBERED_S = 30 * 24 * 3600.0
_LOOK_S = 0.2


class _Claim(Submitter, frozen=True, kw_only=True):
    """Who submits with a token, or did."""

    run_dir: str
    finished: bool = False
    """Of a sweep: everything of it was handed over."""


class Submission:
    """One submission with a token."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_job(self, scheduler: Scheduler) -> Entry | None:
        """The job that was submitted with this token; one that is being submitted is awaited. None: there is none.

        Raises:
            SchedulerDownError: another login host began it just now, and it is not known how that ended.
        """
        claim = self._await_claim()
        if claim is None:
            return None
        entry = adopt_job(Path(claim.run_dir), scheduler)
        if entry is None:
            _refuse_if_elsewhere(claim)
        return entry

    def find_end(self) -> float | None:
        """When the sweep that was submitted with this token was handed over; None: it was not, or not all of it.

        Raises:
            SchedulerDownError: as `find_job`.
        """
        claim = self._await_claim()
        if claim is None or claim.finished:
            return None if claim is None else claim.when
        _refuse_if_elsewhere(claim)
        return None

    def _await_claim(self) -> _Claim | None:
        """What is on record, once no process of this host submits with this token."""
        while (claim := self._read()) is not None and not claim.finished and claim.is_under_way:
            text = f"process {claim.pid} of this host is submitting this already: waiting for it"
            warnings.warn(text, HpcJobsWarning, stacklevel=3)  # printed once
            time.sleep(_LOOK_S)
        return claim

    def begin(self, run_dir: Path) -> None:
        """Record that the job or sweep of ``run_dir`` is being submitted."""
        self._write(run_dir, finished=False)

    def finish(self, run_dir: Path) -> None:
        """Record that all of the sweep in ``run_dir`` is handed over."""
        self._write(run_dir, finished=True)

    def _write(self, run_dir: Path, *, finished: bool) -> None:
        claim = _Claim(run_dir=str(run_dir), finished=finished, **msgspec.structs.asdict(this_process()))
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in self._path.parent.glob("*.json"):
            if path.stat().st_mtime < time.time() - _REMEMBERED_S:
                path.unlink(missing_ok=True)
        write_beside(self._path, msgspec.json.encode(claim))

    def forget(self) -> None:
        """Record that no job was submitted."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> _Claim | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Claim)
        except FileNotFoundError:
            return None


def _refuse_if_elsewhere(claim: _Claim) -> None:
    age_s = time.time() - claim.when
    if not claim.is_here and age_s < UNDECIDED_S:
        raise SchedulerDownError(
            f"login host {claim.host} began to submit this {age_s:.0f} s ago, and has not recorded a job",
            hint=f"try again: in {UNDECIDED_S - age_s:.0f} s it is submitted from here",
            maybe_taken=True,
        )


_numbers = itertools.count()


def next_submission() -> Submission | None:
    """The next submission of this command; None: it has no token."""
    token = os.environ.get(VARIABLE)
    if token is None:
        return None
    return Submission(state_dir() / "submissions" / f"{token}-{next(_numbers)}.json")


@contextmanager
def finish_without_terminal() -> Iterator[None]:
    """Within the block, a lost connection does not end this process: what it does will be on record."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
