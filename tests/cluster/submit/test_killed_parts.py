"""Jobs whose own parts are killed, whose limit is shortened, or that are tasks of an array, on a real Slurm."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from login_node import Cluster, Submitted
from waiting import eventually

COUNT = """
import os, pathlib, sys, time
from hpcjobs.runtime import signals

stop, rank = signals.listen(), os.environ["RANK"]
place = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / ("count-" + rank)
n = int(place.read_text()) if place.exists() else 0
while n < int(sys.argv[1]):
    time.sleep(0.1)
    n += 1
    if rank == "0":
        signals.write_number(signals.STEPS, n)
        signals.record_progress(n)
        place.write_text(str(n))
        print(n, flush=True)
    if stop.requested:
        place.write_text(str(n))
        signals.leave(n)
"""
ARRAY = """
import os, pathlib, time
from hpcjobs.runtime import signals

folder = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"])
starts = folder / "starts"
with starts.open("a") as file:
    file.write("start\\n")
if os.environ["SLURM_ARRAY_TASK_ID"] == os.environ["ASKS"] and len(starts.read_text().split()) == 1:
    while len(list(folder.parent.glob("*/starts"))) < 3:
        time.sleep(0.1)
    signals.leave(5)
while not (folder.parent / "enough").exists():
    time.sleep(0.1)
"""


def steps(job: Submitted) -> int:
    place = job.run_dir / "control" / "steps"
    return int(place.read_text() or 0) if place.exists() else 0


def history(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "attempts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def words_of(pid: int | str, name: str) -> list[str]:
    try:
        return Path("/proc", str(pid), name).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def deciding_process(job: Submitted) -> int:
    return int(json.loads((job.run_dir / "control" / "running").read_text())["pid"])


def script_of(job: Submitted) -> int:
    """The bash that runs the rest of the script."""
    (child,) = (
        int(each.name)
        for each in Path("/proc").glob("[0-9]*")
        if words_of(each.name, "cmdline")[:1] == ["bash"] and parent(int(each.name)) == deciding_process(job)
    )
    return child


def stepd_of_batch(job: Submitted) -> int:
    return parent(deciding_process(job))


def stepd_of_rank(job: Submitted, rank: int) -> int:
    expected = {f"HPCJOBS_JOB_ID={job.id}", f"RANK={rank}"}
    pid = next(int(p.name) for p in Path("/proc").glob("[0-9]*") if expected <= set(words_of(p.name, "environ")))
    while not words_of(pid, "cmdline")[0].startswith("slurmstepd: "):  # a rank's shell has this word in its text
        pid = parent(pid)
    return pid


@dataclass(frozen=True)
class Begun:
    decider: Submitted
    script: Submitted
    step: Submitted
    output: Submitted
    batch: Submitted
    shortened: Submitted


@pytest.fixture
def begun(cluster: Cluster) -> Begun:
    count = cluster.program("count.py", COUNT)
    jobs = Begun(
        *(cluster.submit("--retries", "on", "-N", "2", "-t", "30m", count, "150") for _ in range(5)),
        shortened=cluster.submit("--retries", "on", "-N", "2", "-t", "30m", count, "600"),
    )
    fates = {
        "decider": lambda job: os.kill(deciding_process(job), signal.SIGKILL),
        "script": lambda job: os.kill(script_of(job), signal.SIGKILL),
        "step": lambda job: os.kill(stepd_of_rank(job, 1), signal.SIGKILL),
        "output": lambda job: os.kill(stepd_of_rank(job, 0), signal.SIGKILL),
        "batch": lambda job: os.kill(stepd_of_batch(job), signal.SIGKILL),
        "shortened": lambda job: cluster.slurm("scontrol", "update", f"JobId={job.id}", "TimeLimit=1"),
    }

    def all_have_met_theirs() -> bool:
        for name in [name for name in fates if steps(getattr(jobs, name)) >= 10]:
            fates.pop(name)(getattr(jobs, name))
        return not fates

    eventually(all_have_met_theirs, timeout_s=120)
    return jobs


def test_a_job_outlives_its_own_killed_parts_and_a_shortened_limit(cluster: Cluster, begun: Begun) -> None:
    causes = {}
    for name in ("decider", "script", "step", "output", "batch", "shortened"):
        job: Submitted = getattr(begun, name)
        answer = job.wait(timeout_s=240)
        assert answer.code == 0, (name, answer, job.log, history(job.run_dir))
        past = history(job.run_dir)
        assert past[-1]["steps"] == (600 if name == "shortened" else 150), (name, past)
        causes[name] = [(each["cause"], each["decision"]) for each in past]
        assert all(each["steps"] - each["saved"] <= 3 for each in past[:-1]), (name, past)
    print(causes)
    assert causes["decider"][0] == ("node", "requeued")
    assert causes["script"][0] == ("preempt", "requeued")
    assert causes["step"][-1] == ("completed", "completed")
    assert causes["output"][0] in (("node", "requeued"), ("preempt", "requeued"))
    assert causes["batch"][-1] == ("completed", "completed")
    assert causes["shortened"][0] == ("timeout", "requeued")


def test_only_the_task_that_asks_is_requeued_also_if_its_raw_id_is_the_arrays(cluster: Cluster) -> None:
    program = cluster.program("array.py", ARRAY)
    # The task whose record the array keeps, and so its raw id, is the last one.
    arrays = [cluster.submit("--retries", "on", "--array", "0-2", "--env", f"ASKS={asks}", program) for asks in (2, 0)]
    for array, asks in zip(arrays, ("2", "0"), strict=True):
        starts = [array.run_dir / task / "starts" for task in "012"]
        request = array.run_dir / asks / "starts"
        eventually(lambda request=request: request.exists() and len(request.read_text().split()) == 2, timeout_s=120)  # type: ignore[misc]
        assert [len(path.read_text().split()) for path in starts] == [2 if path == request else 1 for path in starts]
        (array.run_dir / "enough").touch()
    for array, asks in zip(arrays, ("2", "0"), strict=True):
        array.done()
        assert {task: len(history(array.run_dir / task)) for task in "012"} == {
            task: 2 if task == asks else 1 for task in "012"
        }
