"""Submissions through an sbatch that takes the job and loses its answer at random, on a real Slurm."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from login_node import SITE, Cluster

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
