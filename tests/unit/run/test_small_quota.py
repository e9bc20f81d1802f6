"""A run folder on a file system of 1 MB that fills up."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok, within

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.job.models import Plan
from hpcjobs.job.plan import plan
from hpcjobs.run.submit import submit
from hpcjobs.scheduler.base import JobRecord, Submitted

LOCAL = ("--site", "local", "--launcher", "spawn")


@pytest.fixture
def runs(here: Path) -> Iterator[Path]:
    """The folder that run folders are made in, of 1 MB."""
    path = here / "runs"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(runs: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={runs}/ballast", "bs=4K"], capture_output=True, check=False)


class FillsTheDisk:
    """A scheduler that accepts a job just as the disk becomes full."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs

    def submit(self, plan: Plan) -> Submitted:
        fill(self._runs)
        return Submitted(job_id="L9")

    def show_jobs(self, job_ids: list[str]) -> list[JobRecord]:
        return []

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        return []

    def queue(self) -> list[JobRecord]:
        return []

    def account(self, job_ids: object) -> list[JobRecord]:
        return []

    def cancel(self, job_ids: object) -> None:
        raise AssertionError


def test_a_full_disk_refuses_a_submission_and_leaves_nothing(runs: Path) -> None:
    fill(runs)
    answer = within("submit", *LOCAL, "true")
    assert answer.code == 5, answer
    assert "No space left on device" in answer.err
    assert os.listdir(runs) == ["ballast"]


def test_a_disk_that_is_full_once_the_job_is_accepted_keeps_id_script_and_folder(runs: Path) -> None:
    request = plan(["true"], site="local", launcher="spawn")
    with pytest.warns(HpcJobsWarning, match="job L9 was accepted, but could not be recorded in its run folder"):
        handle = submit(request, scheduler=FillsTheDisk(runs))
    assert handle.id == "L9"
    assert (handle.run_dir / "job.sh").exists()
    assert within("show", "L9").out.startswith("job L9  true")


def test_a_job_that_fills_its_disk_is_waited_for_and_shown(runs: Path) -> None:
    answer = within("submit", *LOCAL, "--wait", "sh", "-c", "dd if=/dev/zero of=$HPCJOBS_RUN_DIR/big bs=4K; exit 3")
    assert answer.code == 3, answer
    assert " FAILED " in within("ps").out


@pytest.mark.parametrize("table", ["--csv", "--parquet"])
def test_a_table_that_a_full_disk_cuts_short_is_named(runs: Path, table: str) -> None:
    ok("submit", *LOCAL, "--wait", "true")
    fill(runs)
    answer = within("report", "jobs", "--site", "local", table, str(runs / "jobs"))
    assert (answer.code, f"{runs / 'jobs'}: No space left on device" in answer.err) == (3, True), answer
