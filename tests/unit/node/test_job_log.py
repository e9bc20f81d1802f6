"""What the job's log says about the attempt, read by the process that writes it as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_error_texts import GpuErrorText, read_texts

ASK = """
import sys
from hpcjobs.node.job_log import JobLog
log = JobLog()
sys.stderr.write(sys.argv[1] + "\\n")
sys.stderr.flush()
sys.stdout.write(str(log.names_gpu_fault()))
"""


@pytest.mark.parametrize("error", read_texts(), ids=lambda error: f"{error.effect}-{error.message[-30:]}")
def test_only_faults_of_the_node_make_an_attempt_end_by_its_node(error: GpuErrorText, tmp_path: Path) -> None:
    with open(tmp_path / "job.out", "w") as log:
        done = subprocess.run(
            [sys.executable, "-c", ASK, error.text],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=120,
            check=True,
        )
    assert done.stdout == str(error.effect == "fault")
