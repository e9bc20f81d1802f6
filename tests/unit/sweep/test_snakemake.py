"""Snakemake's rules as jobs of hpcjobs, by the profile that is shipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcjobs.scheduler.base import State

pytest.importorskip("snakemake")
REPOSITORY = Path(__file__).parents[3]
PROFILE = REPOSITORY / "templates/workflows/snakemake"
SNAKEFILE = """
rule total:
    input: expand("counts/{n}.txt", n=[1, 2])
    output: "total.txt"
    shell: "cat {input} > {output}"

rule count:
    output: "counts/{n}.txt"
    shell: "echo {wildcards.n} > {output}; [ {wildcards.n} != 9 ]"
"""


def snakemake(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "Snakefile").write_text(SNAKEFILE)
    shutil.copytree(PROFILE, folder / "profile", dirs_exist_ok=True)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ("--profile", "./profile", "--seconds-between-status-checks", "1", "--max-status-checks-per-second", "10")
    return subprocess.run(
        ["snakemake", *options, *args],
        cwd=folder,
        env={**os.environ, "PATH": path, "HOME": str(home), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_rules_run_as_jobs_and_a_rule_that_fails_is_known_as_failed(tmp_path: Path) -> None:
    done = snakemake(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "total.txt").read_text() == "1\n2\n"
    assert len(list(tmp_path.glob("runs/smk-count-*"))) == 2
    failed = snakemake(tmp_path, "counts/9.txt")
    assert failed.returncode == 1
    assert re.search(r"Error in rule count:.*external_jobid: L4", failed.stderr, re.DOTALL), failed.stderr


def test_the_profile_knows_every_state_that_a_job_can_end_in() -> None:
    script = (PROFILE / "status.sh").read_text()
    ended = set(re.findall(r'"([A-Z_]+)"', script.split("ended = {")[1].split("}")[0]))
    assert ended == {state.value for state in State if state.ended} - {"COMPLETED"}
