"""What a user does with jobs after submission: arrays, dependencies, waiting, cancelling, watching."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import time
from pathlib import Path

import pytest
from commandline import start
from login_node import SITE, Cluster
from waiting import eventually

import hpcjobs
from hpcjobs.processes.tree import parent
from hpcjobs.run.wait import wait
from hpcjobs.sandbox import Sandbox
from hpcjobs.units import task_ids

SLEEP = ("sleep", "600")


def test_submit_with_the_site_alone_runs_the_job_of_the_project_file(cluster: Cluster) -> None:
    cluster.program("train.py", "import os\nprint(f\"rank {os.environ['RANK']}\")\n")
    wrote = cluster.hpcjobs("init", "-N", "2", "-t", "5", "train.py")
    assert wrote.code == 0, wrote
    answer = cluster.hpcjobs("submit", "--site", SITE)
    assert answer.code == 0, answer
    job_id = answer.out.split()[1]
    cluster.submitted.append(job_id)
    waited = cluster.hpcjobs("wait", job_id)
    assert (waited.code, f"job {job_id} COMPLETED on tu[" in waited.err) == (0, True), waited
    assert sorted(cluster.hpcjobs("logs", job_id).out.splitlines()) == ["0: rank 0", "1: rank 1"]


def test_array_tasks_have_folders_of_their_own_and_the_first_failure_is_the_exit_code(cluster: Cluster) -> None:
    program = cluster.program(
        "task.sh",
        '#!/bin/bash\necho "task $SLURM_ARRAY_TASK_ID in $HPCJOBS_RUN_DIR"\nexit $((SLURM_ARRAY_TASK_ID / 3 * 4))\n',
    )
    job = cluster.submit("--array", "0-3%2", program)
    answer = job.wait()
    assert answer.code == 4, answer
    eventually(lambda: job.sacct() == {f"{job.id}_{n}": "FAILED" if n == 3 else "COMPLETED" for n in range(4)})
    for n in range(4):
        state = json.loads((job.run_dir / str(n) / "state.json").read_text())
        assert (state["state"], state["exit_code"]) == (("FAILED", 4) if n == 3 else ("COMPLETED", 0))
        assert cluster.hpcjobs("logs", f"{job.id}_{n}").out.count(f"task {n} in {job.run_dir}/{n}\n") == 1
    assert cluster.hpcjobs("wait", f"{job.id}_2").code == 0
    assert cluster.hpcjobs("wait", f"{job.id}_3").code == 4


def test_a_job_starts_after_the_one_it_is_told_to_follow(cluster: Cluster) -> None:
    mark = cluster.folder / "mark"
    first = cluster.submit("-o", "hold", "touch", str(mark))
    second = cluster.submit("--after", first.id, "cat", str(mark))
    (row,) = [row for row in cluster.rows() if row["record"]["job_id"] == second.id]
    assert (row["record"]["state"], row["record"]["reason"]) == ("PENDING", "Dependency")
    cluster.slurm("scontrol", "release", first.id)
    second.done()


def test_a_pending_job_is_cancelled_and_waiting_for_it_ends(cluster: Cluster) -> None:
    job = cluster.submit("-o", "hold", *SLEEP)
    assert cluster.hpcjobs("cancel", job.id).out == f"cancelled {job.id}\n"
    answer = cluster.hpcjobs("wait", "--timeout", "400", job.id)
    assert answer.code == 143, answer
    assert f"job {job.id} CANCELLED" in answer.err


def test_a_pending_array_is_cancelled_and_waiting_for_it_ends(cluster: Cluster) -> None:
    job = cluster.submit("-o", "hold", "--array", "2-4", *SLEEP)
    assert cluster.hpcjobs("cancel", job.id).code == 0
    answer = cluster.hpcjobs("wait", "--timeout", "400", job.id)
    assert answer.code == 143, answer
    assert "CANCELLED" in answer.err


def test_a_cancelled_task_of_a_waiting_array_stays_cancelled_while_the_others_run(cluster: Cluster) -> None:
    """slurmdbd never hears of a task that is taken out of an array before it begins."""
    job = cluster.submit("-o", "hold", "--array", "0-2", "true")
    assert cluster.hpcjobs("cancel", f"{job.id}_1").out == f"cancelled {job.id}_1\n"
    (waiting,) = [row for row in cluster.rows() if row["record"]["state"] == "PENDING"]
    assert task_ids(waiting["record"]["job_id"]) == [f"{job.id}_0", f"{job.id}_2"]
    cluster.slurm("scontrol", "release", job.id)
    answer = cluster.hpcjobs("wait", "--timeout", "400", job.id)
    assert (answer.code, f"job {job.id}_1 CANCELLED" in answer.err) == (143, True), answer
    assert "2 COMPLETED, 1 CANCELLED" in cluster.hpcjobs("ps", "-a").out


def test_a_running_job_is_cancelled_and_says_so_itself_and_to_the_accounting(cluster: Cluster) -> None:
    job = cluster.submit("-N", "2", "--ntasks-per-node", "2", "--name", "long", *SLEEP)
    job.becomes("RUNNING")
    eventually(lambda: (job.run_dir / "state.json").exists())
    assert cluster.hpcjobs("cancel", "long").out == f"cancelled {job.id}\n"
    answer = job.wait(timeout_s=240)
    assert answer.code != 0
    assert job.state["state"] == "CANCELLED"
    eventually(lambda: job.sacct()[job.id].startswith("CANCELLED"))
    assert f"job {job.id} CANCELLED" in answer.err


def test_listing_a_hundred_jobs_asks_the_queue_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.submit("-o", "hold", "--name", "alone", *SLEEP)
    array = cluster.submit("-o", "hold", "--array", "0,3-197:2,198-200", *SLEEP)
    queries = counted(cluster, monkeypatch, "squeue", "sacct", "scontrol")
    rows = cluster.rows("--site", SITE)
    assert len(rows) == 2
    assert len(task_ids(rows[1]["record"]["job_id"])) == 102, "the indices are printed in full"
    assert queries.read_text().split() == ["squeue"]
    assert hpcjobs.find(f"{array.id}_197").state == "PENDING"


def counted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, *commands: str) -> Path:
    """A file that gets a line for each call of one of ``commands``."""
    folder, queries = cluster.folder / "bin", cluster.folder / "asked"
    folder.mkdir()
    queries.touch()
    for command in commands:
        wrapper = folder / command
        wrapper.write_text(f'#!/bin/sh\necho {command} >>{queries}\nexec /usr/bin/{command} "$@"\n')
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return queries


def test_a_snapshot_runs_the_code_as_it_was_submitted(cluster: Cluster) -> None:
    program = cluster.program("say.py", 'print("old")\n')
    job = cluster.submit("--snapshot", "-o", "hold", program)
    cluster.program("say.py", 'print("new")\n')
    cluster.slurm("scontrol", "release", job.id)
    assert job.done().log == "old\n"


def test_the_script_runs_by_hand_from_any_folder(cluster: Cluster) -> None:
    job = cluster.submit("-N", "2", "--ntasks-per-node", "2", "bash", "-c", "echo $RANK of $WORLD_SIZE in $PWD").done()
    before = job.log
    (cluster.folder / "elsewhere").mkdir()
    out = cluster.slurm("sbatch", "--wait", "--parsable", str(job.run_dir / "job.sh"))
    again = (job.run_dir / "logs" / f"bash_{out.strip()}.out").read_text()
    assert sorted(again.splitlines()) == sorted(before.splitlines())
    assert f"3: 3 of 4 in {cluster.folder}" in before


def batch_shell(sandbox: Sandbox, job: str) -> int:
    """The pid of a running job's batch script: the eldest process, as its subshells carry the same command line."""
    candidates: set[int] = set()

    def look() -> bool:
        candidates.clear()
        pids = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                arguments = (process / "cmdline").read_text().split("\0")
                if any(
                    w.startswith(f"{sandbox.root}/") and w.endswith(f"job{job:0>5}/slurm_script") for w in arguments
                ):
                    pids.add(int(process.name))
        candidates.update(pid for pid in pids if parent(pid) not in pids)
        return len(candidates) == 1

    eventually(look, what="one eldest process: subshells come and go")  # a subshell may end under this look
    (eldest,) = candidates
    return eldest


def test_a_job_whose_script_was_killed_is_seen_in_the_queue_and_the_accounting(
    cluster: Cluster, sandbox: Sandbox
) -> None:
    job = cluster.submit(*SLEEP)
    job.becomes("RUNNING")
    eventually(lambda: (job.run_dir / "state.json").exists())
    os.kill(batch_shell(sandbox, job.id), signal.SIGKILL)
    eventually(lambda: job.id not in cluster.slurm("squeue", "-h", "--me", "-o", "%i").split())
    assert job.state["state"] == "RUNNING"
    handle = hpcjobs.find(job.id)
    hurried = wait([handle.entry], clock=lambda: time.monotonic() * 100, timeout_s=6000)
    (record,) = hurried[0].records
    assert record.state.ended
    assert record.source == "sacct"
    assert handle.wait() != 0


def test_a_spec_file_says_what_flags_would(cluster: Cluster) -> None:
    (cluster.folder / "job.yaml").write_text(
        "program: [bash, -c, 'echo $GREETING $WORLD_SIZE']\nname: from-spec\nenv: {GREETING: hello}\n"
        "resources: {nodes: 2, ntasks_per_node: 1, time: 5m}\n"
    )
    job = cluster.submit("--spec", "job.yaml", "--ntasks-per-node", "3")
    assert sorted(job.done().log.splitlines()) == [f"{rank}: hello 6" for rank in range(6)]
    assert "TimeLimit=00:05:00" in cluster.slurm("scontrol", "show", "job", job.id)


def test_python_submits_follows_and_reads_results(cluster: Cluster) -> None:
    program = cluster.program("results.py", RESULTS)
    job = hpcjobs.submit(hpcjobs.plan([program, "a b"], site="tu-hpc", nodes=2))
    assert job.wait() == 0
    assert (job.state, job.metrics(), job.summary()) == ("COMPLETED", [{"step": 1}], {"loss": 0.5})
    assert job.logs(rank=1) == "a b\n"
    assert hpcjobs.find(job.id).run_dir == job.run_dir


RESULTS = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["HPCJOBS_RUN_DIR"])
if os.environ["RANK"] == "0":
    (folder / "metrics.jsonl").write_text('{"step": 1}\\n{"step"')
    (folder / "summary.json").write_text('{"loss": 0.5}')
print(sys.argv[1])
"""


def test_following_prints_the_log_as_it_comes_and_ends_with_the_jobs_code(cluster: Cluster) -> None:
    go = cluster.folder / "go"
    program = cluster.program(
        "slow.sh", f"#!/bin/bash\necho one\nuntil [ -e {go} ]; do sleep 0.1; done\necho two\nexit 3\n"
    )
    process = start("submit", "--site", "tu-hpc", "--follow", program)
    assert process.stdout is not None
    first_lines = [process.stdout.readline() for _ in range(4)]
    assert first_lines[3] == "one\n"
    go.touch()
    out, err = process.communicate(timeout=400)
    assert out.startswith("two\n")
    assert process.returncode == 3, err
