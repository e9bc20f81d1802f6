"""The supervisor of an array is killed while it starts a task."""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.local import queue
from hpcjobs.scheduler.local.client import records
from hpcjobs.scheduler.local.queue import Ended, LocalJob, Request


def test_an_array_has_ended_although_a_task_of_it_has_a_folder_and_never_ran(tmp_path: Path) -> None:
    """Else the jobs that depend on it wait for ever."""
    (tmp_path / "active").mkdir()
    array = LocalJob(str(tmp_path), "L1")
    for job in (array, array.task(0), array.task(1)):
        os.makedirs(job.folder)
    array.write(
        Request(
            job_id="L1", name="x", run_dir="/r", script="job.sh", cwd="/", submitted=time.time(), cpus=1, gpus=0,
            machine_cpus=2, machine_gpus=0, grace_s=1.0, array=(0, 1, 2),
        )
    )  # fmt: skip
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
