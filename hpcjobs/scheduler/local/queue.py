"""The queue of this machine: every decision about which job runs, made under one lock by whichever process needs it.

The queue needs no daemon. Supervisors, and commands that list or cancel jobs, each read the folders, mark jobs of
killed supervisors as failed, and wake jobs that can start.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from hpcjobs.files import FULL
from hpcjobs.processes import tree
from hpcjobs.scheduler.local.job_folder import LocalJob, Lock, activate, is_alive, make, wake
from hpcjobs.scheduler.local.policy import Never, QueuedJob, Start, StartDecision, Wait, decide
from hpcjobs.scheduler.local.records import Ended, Started

KILLED = "supervisor was killed"
CANCELLED = "cancelled"


class QueueView(NamedTuple):
    """The queue at one moment, in the order of submission."""

    entries: tuple[QueuedJob, ...]
    verdicts: dict[str, StartDecision]
    unrecorded: Mapping[str, Ended] = MappingProxyType({})
    """Ends of jobs with a killed supervisor, while the disk has no room for their record."""


class Claim(NamedTuple):
    """A job, or a task of an array, that has its slots and is to be run by the claimer."""

    job: LocalJob
    started: Started
    alive: int | None
    """The handle that holds the lock of a task; None for the claimer's job, which is locked already."""


def update(root: str, *, me: LocalJob | None = None) -> QueueView:
    """Read the queue, mark jobs of dead supervisors as failed, and wake all jobs except ``me`` that can start.

    The caller holds the lock.
    """
    unrecorded: dict[str, Ended] = {}
    entries = tuple(_scan(root, unrecorded))
    verdicts = decide(entries, lambda job_id: outcome(LocalJob(root, job_id)))
    for job_id, verdict in verdicts.items():
        job = LocalJob(root, job_id)
        if isinstance(verdict, (Start, Never)) and job != me:
            wake(job)
    return QueueView(entries, verdicts, unrecorded)


def _scan(root: str, unrecorded: dict[str, Ended]) -> Iterator[QueuedJob]:
    active = (LocalJob(root, name) for name in os.listdir(os.path.join(root, "active")))
    for job in sorted(active, key=lambda job: (job.number, -1 if job.element is None else job.element)):
        request = job.read_request()
        if job.read_ended() is not None or request is None:
            os.unlink(job.marker)
        elif not is_alive(job):
            ended = _end_abandoned(job)
            try:
                record(job, ended)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                unrecorded[job.job_id] = ended
        else:
            waiting = _waiting(job, request.array) if job.element is None and request.array is not None else None
            yield QueuedJob(job, request, job.read_started(), waiting)


def _waiting(job: LocalJob, array: tuple[int, ...]) -> tuple[int, ...]:
    if job.cancelled:
        return ()
    known = {task.element for task in job.tasks()}
    return tuple(index for index in array if index not in known)


def _end_abandoned(job: LocalJob) -> Ended:
    """End the processes of a killed supervisor. Tasks of an array have supervisors of their own."""
    started = job.read_started()
    leader = started.leader if started is not None else None
    tree.end(lambda: tree.members(job.folder, leader), grace_s=0)
    return Ended("FAILED", time.time(), reason=KILLED)


def record(job: LocalJob, ended: Ended) -> None:
    """Record the end of a job; from then on it holds no slot. The caller holds the lock."""
    job.write(ended)
    if os.path.exists(job.marker):
        os.unlink(job.marker)


def finish(job: LocalJob, ended: Ended) -> None:
    """Record the end of a job, and wake jobs that can start now."""
    with Lock(job.root):
        record(job, ended)
        update(job.root, me=job)


def claim(job: LocalJob) -> Claim | Wait | Never | None:
    """Start ``job``, or the next task of an array, if it can start now. None: no task waits any more."""
    with Lock(job.root):
        view = update(job.root, me=job)
        verdict = view.verdicts.get(job.job_id)
        if not isinstance(verdict, Start):
            return verdict
        entry = next(entry for entry in view.entries if entry.job == job)
        started = Started(time.time(), verdict.gpus)
        if entry.waiting is None:
            job.write(started)
            return Claim(job, started, None)
        task = job.task(entry.waiting[0])
        try:
            os.mkdir(task.folder, 0o700)
            alive = make(task)
            task.write(started)
            activate(task)
        except OSError:
            shutil.rmtree(task.folder, ignore_errors=True)  # a task with a folder has started
            raise
        return Claim(task, started, alive)


def outcome(job: LocalJob) -> str | None:
    """Final state; None: not ended. An array has ended when all its tasks have, and completed if all did."""
    request = job.read_request()
    if request is None:
        return "UNKNOWN"
    submission_end = job.submitted_job.read_ended()
    if request.array is None or job.element is not None:
        ended = job.read_ended() or (None if os.path.isdir(job.folder) else submission_end)
        return None if ended is None else ended.state
    if submission_end is None:
        return None
    states = [outcome(job.task(index)) for index in request.array]
    if None in states:
        return None
    return next((state for state in states if state != "COMPLETED"), "COMPLETED")


def cancel(job: LocalJob) -> None:
    """End a job, an array or one task. Waiting ones end at once, running ones by their supervisor."""
    with Lock(job.root):
        request = job.read_request()
        if request is None or outcome(job) is not None:
            return
        if job.element is not None and not os.path.isdir(job.folder):
            os.mkdir(job.folder, 0o700)
        started = job.read_started() is not None
        running = [task for task in job.tasks() if task.read_ended() is None] if job.element is None else []
        os.close(os.open(job.path("cancel"), os.O_WRONLY | os.O_CREAT, 0o600))
        if not started and not running:
            record(job, Ended("CANCELLED", time.time(), reason=CANCELLED))
        for one in (job, job.submitted_job, *running):
            wake(one)
        update(job.root)
