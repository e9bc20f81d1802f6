"""The simulated Slurm of tests/simulation answers as a real one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compare(seeds: str, *, limit_s: int) -> str:
    """Play sequences on a sandbox of their own, for so long; 99 of 100 lines must agree."""
    command = [sys.executable, "-W", "ignore", "tests/simulation/conformance.py", "--seeds", seeds]
    done = subprocess.run(
        ["tools/elsewhere", "simulated", *command, "--limit-s", str(limit_s)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_random_commands_have_the_same_answers_on_a_real_and_on_the_simulated_slurm(machine: None) -> None:
    assert " kinds of event" in compare("0-18", limit_s=120)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_hundreds_of_random_commands_have_the_same_answers_on_both(machine: None) -> None:
    assert "300 sequences" in compare("1000-1299", limit_s=3500)
