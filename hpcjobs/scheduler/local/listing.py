"""Reads the files of local jobs into records."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from hpcjobs.job.array import array_text
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.local import queue
from hpcjobs.scheduler.local.job_folder import LocalJob
from hpcjobs.scheduler.local.policy import Wait
from hpcjobs.scheduler.local.records import Request


def records(job: LocalJob, request: Request, view: queue.QueueView) -> Iterator[JobRecord]:
    """One record; of an array as a whole that of its tasks that have no folder, if there are any."""
    if request.array is None or job.element is not None:
        no_folder = job.element is not None and not os.path.isdir(job.folder)
        yield _record(job, job.submitted_job if no_folder else job, request, view)
        return
    known = {task.element for task in job.tasks()}
    waiting = [index for index in request.array if index not in known]
    if waiting:
        yield _record(job._replace(job_id=f"{job.job_id}_[{array_text(waiting)}]"), job, request, view)


def _record(shown: LocalJob, job: LocalJob, request: Request, view: queue.QueueView) -> JobRecord:
    """What the files of ``job`` say, under the id of ``shown``."""
    started, ended = job.read_started(), job.read_ended()
    verdict = view.verdicts.get(job.submitted_job.job_id)
    reason = verdict.reason if isinstance(verdict, Wait) else None
    if ended is not None:
        state, reason = State.parse(ended.state), ended.reason
    elif started is not None:
        state, reason = (State.COMPLETING, queue.CANCELLED) if job.cancelled else (State.RUNNING, None)
    elif job.cancelled:
        state, reason = State.CANCELLED, queue.CANCELLED
    else:
        state = State.PENDING
    until = ended.ended if ended is not None else time.time()
    return JobRecord(
        job_id=shown.job_id,
        state=state,
        source="local",
        name=request.name,
        reason=reason,
        node_list=os.uname().nodename if started is not None else None,
        nnodes=1,
        submitted=request.submitted,
        started=started.started if started is not None else None,
        ended=ended.ended if ended is not None else None,
        elapsed_s=until - started.started if started is not None else None,
        exit_code=ended.exit_code if ended is not None else None,
        signal=ended.signal if ended is not None else None,
        cpu_s=ended.cpu_s if ended is not None else None,
        max_rss_bytes=ended.max_rss_bytes if ended is not None else None,
        command=request.script,
        time_limit_s=request.time_limit_s,
    )
