"""A job that meets its time limit; it began with the first test of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from login_node import Cluster


def test_a_job_over_its_time_limit_is_told_as_such(
    cluster: Cluster, overtime: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home, job_id = overtime
    monkeypatch.setenv("HOME", str(home))
    answer = cluster.hpcjobs("wait", "--timeout", "400", job_id)
    assert answer.code not in (0, 3), answer
    assert f"job {job_id} TIMEOUT" in answer.err
    (row,) = cluster.rows()
    assert (row["record"]["state"], row["record"]["source"]) == ("TIMEOUT", "sacct")
