"""A site file that ``sites init`` writes from a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ok

from hpcjobs.sandbox import Sandbox


def test_jobs_run_by_the_file_as_it_is_written_also_where_a_partition_needs_a_qos(
    sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    ok("sites", "init", "ours")
    monkeypatch.delenv("SLURM_CONF")
    jobs = [
        ok("submit", "--site", "ours", *arguments, "--parsable", "hostname").out for arguments in ((), ("-p", "long"))
    ]
    for job in jobs:
        ok("wait", "--site", "ours", job.strip().partition(";")[0])
