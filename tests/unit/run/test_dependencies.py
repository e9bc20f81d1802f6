"""Jobs that start after others, named as everywhere else."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from commandline import ok, within
from scripted_slurm import answer
from slurm_rows import print_rows, queued_row

from hpcjobs.run import index
from hpcjobs.run.index import Entry


@pytest.fixture
def jobs(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site, and three jobs of it: one was resubmitted, one is an array; gives the folder of Slurm's answers."""
    (here / "mine.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 4}}}\nrun_root: runs\n")
    monkeypatch.setenv("HPCJOBS_SITE", "./mine.yaml")
    for job_id, name, array in (("11", "plain", None), ("12", "again", None), ("13", "many", "0-3")):
        folder = here / "runs" / name
        (folder / "control").mkdir(parents=True)
        index.add(Entry(job_id, name, "mine", "slurm", str(folder), time.time(), array=array))
    (here / "runs" / "again" / "control" / "continued").write_text("20\n")
    answers = tmp_path / "slurm"
    answers.mkdir()
    answer(answers, "sbatch", "echo 42")
    answer(answers, "sacct", ":")
    answer(answers, "scontrol", ":")
    monkeypatch.setenv("PATH", f"{answers}:{Path('/usr/bin')}:{Path('/bin')}")
    return answers


@pytest.mark.parametrize(
    ("arguments", "dependency"),
    [
        (("--after", "11"), "afterok:11"),
        (("--after", "11", "--after", "13_2"), "afterok:11:13_2"),
        (("--after-any", "11"), "afterany:11"),
        (("--after-fail", "plain"), "afternotok:11"),
        (("--after", "again"), "afterok:20"),
        (("--after", "11+10m"), "after:11+10"),
        (("--after", "plain+2h", "--after-any", "13"), "after:11+120,afterany:13"),
        (("-d", "singleton", "--after", "11"), "singleton,afterok:11"),
    ],
)
def test_jobs_are_named_by_id_and_name_and_of_resubmitted_ones_the_current_is_meant(
    jobs: Path, arguments: tuple[str, ...], dependency: str
) -> None:
    assert f"#SBATCH --dependency={dependency}\n" in ok("submit", *arguments, "--dry-run", "true").out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--after", "99"), 6, "no job 99"),
        (("--after-fail", "nobody"), 6, "no job named 'nobody'"),
        (("--after", "11+90s"), 5, "Slurm counts the delay in minutes"),
        (("--after", "11+soon"), 6, "no job named"),
    ],
)
def test_a_job_that_is_not_there_is_named(jobs: Path, arguments: tuple[str, ...], code: int, text: str) -> None:
    answered = within("submit", *arguments, "--dry-run", "true")
    assert (answered.code, text in answered.err) == (code, True), answered


@pytest.mark.parametrize(
    ("kind", "state", "text"),
    [
        ("--after", "FAILED", "--after 11: the job has ended, FAILED; it will not succeed"),
        ("--after", None, "--after 11: the scheduler does not know the job any more, and it wrote no end"),
        ("--after-fail", "COMPLETED", "--after-fail 11: the job has COMPLETED, it will not fail"),
        ("--after", "COMPLETED", None),
        ("--after-fail", "FAILED", None),
        ("--after-any", "FAILED", None),
    ],
)
def test_a_dependency_on_a_job_that_has_ended_otherwise_is_refused_and_not_left_to_slurm_which_may_have_forgotten_it(
    jobs: Path, here: Path, kind: str, state: str | None, text: str | None
) -> None:
    answer(jobs, "squeue", ":")
    end = {"job_id": "11", "state": state, "exit_code": 0, "started": time.time(), "ended": time.time(), "nodes": "n1"}
    if state is not None:
        (here / "runs/plain/state.json").write_text(json.dumps(end))
    answered = within("submit", kind, "plain", "true")
    if text is None:
        assert answered.code == 0, answered
        return
    assert (answered.code, text in answered.err) == (5, True), answered
    assert not (jobs / "sbatch.asked").exists()


def test_a_job_whose_state_slurm_calls_by_a_name_of_a_later_version_is_one_that_still_runs(jobs: Path) -> None:
    row = queued_row(JobID=11, JobName="plain", State="THINKING", Submit="$(date +%s)", Start="N/A", Elapsed="0:00")
    answer(jobs, "squeue", print_rows(row))
    assert within("submit", "--after", "plain", "true").code == 0


def test_waiting_ends_when_what_a_job_depends_on_can_never_happen(jobs: Path) -> None:
    job = {"JobID": 11, "JobName": "plain", "State": "PENDING", "Reason": "DependencyNeverSatisfied"}
    answer(jobs, "squeue", print_rows(queued_row(**job, Submit="$(date +%s)")))
    answered = within("wait", "--timeout", "20", "11")
    assert answered.code == 1
    assert "job 11 will not start: its dependency can never be satisfied" in answered.err
    assert "hpcjobs cancel 11" in answered.err


def test_the_id_alone_is_printed_as_by_sbatch(jobs: Path) -> None:
    assert ok("submit", "--parsable", "true").out == "42\n"
