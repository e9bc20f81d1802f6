"""Submissions, on the login node and by a job, through an sbatch that takes the job and loses its answer at random."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from login_node import SITE, Cluster
from waiting import eventually

_SBATCH = """#!/bin/bash
{sbatch} "$@" >{folder}/answer || exit
sleep $((RANDOM % 3))
case $((RANDOM % 4)) in
    0) cat {folder}/answer ;;
    1) echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1 ;;
    2) echo 'Welcome to the cluster' ;;
    3) kill -KILL $$ ;;
esac
"""


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_each_submission_runs_once_and_is_known_although_its_answer_is_lost(
    cluster: Cluster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cluster.folder / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(_SBATCH.format(sbatch=shutil.which("sbatch"), folder=folder))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    chance, ran = random.Random(1), cluster.folder / "ran"
    ran.mkdir()
    longest_s = 1 if count < 50 else 30
    program = cluster.program("once.sh", f'#!/bin/bash\necho "$1" >"{ran}/$1-$SLURM_JOB_ID"\nsleep "$2"\n')
    jobs = {}
    for number in range(count):
        submit = ("submit", "--site", SITE, "--json", "-t", "5m", program, str(number))
        answer = cluster.hpcjobs(*submit, str(chance.randint(0, longest_s)))
        assert answer.code == 0, answer
        jobs[number] = cluster.took(answer.out)
    for job in jobs.values():
        job.done()
    assert {path.name for path in Path(ran).iterdir()} == {f"{number}-{job.id}" for number, job in jobs.items()}
    assert {row["record"]["job_id"] for row in cluster.rows("-a")} == {job.id for job in jobs.values()}


_LATE_SBATCH = """#!/bin/bash
[ ! -e {folder}/asked ] || exec {sbatch} "$@"
touch {folder}/asked
(until [ -e {folder}/go ]; do sleep 0.1; done; {sbatch} "$@" >{folder}/answer; touch {folder}/done) &>/dev/null &
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""


def own_queue(cluster: Cluster) -> list[str]:
    """The lines of squeue about jobs of this test: another one may have left its own."""
    lines = cluster.slurm("squeue", "-h", "--me", "-o", "%i %T %r %o").splitlines()
    return [line for line in lines if str(cluster.folder) in line]


@pytest.mark.parametrize("options", [(), ("--retries", "on"), ("--array", "0-1")])
def test_a_job_that_slurm_takes_up_after_the_one_in_its_place_leaves_as_it_starts(
    cluster: Cluster, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cluster.folder / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(_LATE_SBATCH.format(sbatch=shutil.which("sbatch"), folder=folder))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    program = cluster.program("note.sh", f'#!/bin/bash\necho "$SLURM_JOB_ID" >>"{folder}/ran"\n')
    job = cluster.submit(*options, "-t", "5m", program)
    (folder / "go").touch()
    eventually((folder / "done").exists)
    late = (folder / "answer").read_text().strip()
    eventually(lambda: not own_queue(cluster), what="the end of both jobs")
    assert late.isdigit()
    assert late != job.id
    assert len((folder / "ran").read_text().split()) == (2 if "--array" in options else 1)
    assert job.wait().code == 0
    logs = [path.read_text() for path in (job.run_dir / "logs").glob(f"*_{late}*.out")]
    assert logs
    assert [log for log in logs if "the request of this job came late" not in log] == []


_SBATCH_OF_A_NODE = """#!/bin/bash
case "$*" in *--dependency=afterany*) ;; *) exec {sbatch} "$@" ;; esac
answer=$({sbatch} "$@") || exit
case $((RANDOM % 5)) in
    0) echo "$answer" ;;
    1) echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1 ;;
    2) echo 'Welcome to the cluster' ;;
    3) kill -KILL $$ ;;
    4) kill -KILL $PPID ;;
esac
"""
_TWO_ATTEMPTS = """#!/bin/bash
until [ -e "{ran}/may-end-$1" ]; do sleep 0.2; done
echo "$SLURM_JOB_ID" >>"{ran}/$1"
[ "$(wc -l <"{ran}/$1")" -gt 1 ] || exit 85
sleep "$2"
"""


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_each_job_that_may_not_be_requeued_continues_once_and_is_known_although_its_sbatch_loses_the_answer(
    cluster: Cluster, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sbatch in five kills the process that decides about the job."""
    folder, ran = cluster.folder / "bin", cluster.folder / "ran"
    folder.mkdir()
    ran.mkdir()
    (folder / "sbatch").write_text(_SBATCH_OF_A_NODE.format(sbatch=shutil.which("sbatch")))
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    program = cluster.program("twice.sh", _TWO_ATTEMPTS.format(ran=ran))
    jobs = []
    for number in range(count):
        longest_s = 600 if number == 0 else number % 3
        jobs.append(cluster.submit("--retries", "on", "-t", "20m", program, str(number), str(longest_s)))
        cluster.slurm("scontrol", "update", f"JobId={jobs[-1].id}", "Requeue=0")
        (ran / f"may-end-{number}").touch()

    def attempts(number: int) -> list[str]:
        return (ran / str(number)).read_text().split() if (ran / str(number)).exists() else []

    waited = cluster.hpcjobs("wait", *(job.id for job in jobs[1:]), timeout_s=600 + 10 * count)
    assert waited.code == 0, waited
    eventually(lambda: len(attempts(0)) == 2)
    assert cluster.hpcjobs("cancel", jobs[0].id).code == 0
    eventually(lambda: not own_queue(cluster), what="the end of all jobs")
    for number, job in enumerate(jobs):
        assert len(attempts(number)) == 2, number
        assert attempts(number)[0] == job.id
    states = {row["record"]["job_id"]: row["record"]["state"] for row in cluster.rows("-a")}
    assert states == {job.id: "CANCELLED" if job is jobs[0] else "COMPLETED" for job in jobs}
    assert f"resubmitted as {attempts(0)[1]}" in cluster.hpcjobs("show", jobs[0].id).out
