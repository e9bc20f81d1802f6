"""Supervisors are killed as they start a job, or soon after."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.local import queue
from hpcjobs.scheduler.local.client import records
from hpcjobs.scheduler.local.queue import Ended, LocalJob, QueuedJob, Request, Start, Wait


def make_request(job_id: str, *, cpus: int = 1, array: tuple[int, ...] | None = None) -> Request:
    return Request(
        job_id=job_id, name="x", run_dir="/r", script="job.sh", cwd="/", submitted=time.time(), cpus=cpus, gpus=0,
        machine_cpus=2, machine_gpus=0, grace_s=1.0, array=array,
    )  # fmt: skip


def test_a_job_that_waits_for_room_looks_after_the_one_that_is_about_to_start(tmp_path: Path) -> None:
    """Where that one is killed later, nobody else would notice, and the queue would stand still until the next look."""
    jobs = [LocalJob(str(tmp_path), job_id) for job_id in ("L1", "L2")]
    entries = [QueuedJob(job, make_request(job.job_id, cpus=2)) for job in jobs]
    assert queue.decide(entries, lambda job_id: None) == {"L1": Start(()), "L2": Wait("Resources", (jobs[0],))}


def test_an_array_has_ended_although_a_task_of_it_has_a_folder_and_never_ran(tmp_path: Path) -> None:
    """Else the jobs that depend on it wait for ever."""
    (tmp_path / "active").mkdir()
    array = LocalJob(str(tmp_path), "L1")
    for job in (array, array.task(0), array.task(1)):
        os.makedirs(job.folder)
    array.write(make_request("L1", array=(0, 1, 2)))
    array.task(0).write(Ended("COMPLETED", time.time(), exit_code=0))
    assert queue.outcome(array) is None
    array.write(Ended("FAILED", time.time(), reason=queue.KILLED))
    assert queue.outcome(array) == "FAILED"
    request = array.read_request()
    assert request is not None
    (shown,) = records(array.task(1), request, queue.QueueView((), {}))
    assert (shown.job_id, shown.state) == ("L1_1", State.FAILED)
    Path(array.task(1).marker).touch()  # it runs
    assert queue.outcome(array) is None
