"""What the job's log says about the attempt, read by the process that writes it as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_error_texts import COUNTERS, GpuErrorText, read_texts

ASK = """
import sys
from hpcjobs.node.step import JobLog
log = JobLog()
sys.stderr.write(sys.argv[1] + "\\n")
sys.stderr.flush()
sys.stdout.write(str(log.names_gpu_fault()))
"""


def names_gpu_fault(text: str, log: Path) -> bool:
    with log.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-c", ASK, text], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120, check=True
        )
    return done.stdout == "True"


def test_counters_of_errors_that_are_zero_do_not_blame_the_node(tmp_path: Path) -> None:
    assert not names_gpu_fault(COUNTERS, tmp_path / "job.out")


@pytest.mark.parametrize("error", read_texts(), ids=lambda error: f"{error.effect}-{error.message[-30:]}")
def test_only_faults_of_the_node_make_an_attempt_end_by_its_node(error: GpuErrorText, tmp_path: Path) -> None:
    assert names_gpu_fault(error.text, tmp_path / "job.out") == (error.effect == "fault")
