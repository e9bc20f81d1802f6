"""hpcjobs on a Slurm that is set up as other sites do it; in a network and an /etc of its own (tools/elsewhere)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ELSEWHERE = HERE.parents[1] / "tools" / "elsewhere"


def test_jobs_of_an_ordinary_user_live_where_much_is_hidden_forbidden_or_missing(machine: None) -> None:
    """The tests of unlike/hidden.py, on their own sandbox."""
    run_elsewhere("hidden.py")


@pytest.mark.timeout(900)
def test_site_files_are_written_from_clusters_of_five_kinds_and_checked_after_changes(machine: None) -> None:
    """The tests of unlike/changing.py, on sandboxes of their own."""
    run_elsewhere("changing.py")


def test_ranks_have_the_cores_and_gpus_that_the_site_file_names(machine: None) -> None:
    """The tests of unlike/affinity.py, on their own sandbox, whose Slurm binds tasks."""
    run_elsewhere("affinity.py")


def test_memory_close_to_the_limit_of_a_control_group_is_an_alarm(machine: None) -> None:
    """The test of unlike/memory.py, on its own sandbox."""
    run_elsewhere("memory.py")


def test_requests_on_three_public_clusters_have_the_effect_that_they_have_with_plain_sbatch(machine: None) -> None:
    """The tests of unlike/public_clusters.py: names with a colon, associations per partition, a plugin that routes."""
    run_elsewhere("public_clusters.py")


def test_a_job_that_starts_on_another_cluster_of_the_federation_is_served_by_every_verb(machine: None) -> None:
    """The tests of unlike/federation.py: its own sandbox, and a cluster without nodes where the jobs are submitted."""
    run_elsewhere("federation.py")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_requests_on_ten_more_public_clusters_have_the_effect_that_they_have_with_plain_sbatch(machine: None) -> None:
    """The long tests of unlike/public_clusters.py: three minutes on two cores."""
    run_elsewhere("public_clusters.py", "-m", "long")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_running_tasks_are_watched_by_one_question_per_refresh(machine: None) -> None:
    """The test of unlike/many_tasks.py, on its own sandbox: a minute on two cores, and 4 GiB."""
    run_elsewhere("many_tasks.py")


def run_elsewhere(tests: str, *options: str) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(HERE / "unlike" / tests)]
    done = subprocess.run(
        [str(ELSEWHERE), "unlike", *command],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
