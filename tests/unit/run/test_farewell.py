"""What stays known of the jobs of a cluster that was taken down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from hpcjobs.run import index, status
from hpcjobs.run.index import Entry
from hpcjobs.run.status import statuses
from hpcjobs.scheduler.base import Scheduler

CONF = "/gone/slurm.conf"


def nobody(kind: str, conf: str | None) -> Scheduler:
    raise AssertionError(f"{kind} {conf} was asked")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    entry = Entry("7", "train", "tu-hpc", "slurm", str(tmp_path / "run"), submitted=1.0, slurm_conf=CONF)
    index.add(entry)
    return entry


def wrote(entry: Entry, state: str, **more: object) -> None:
    state_values = {"job_id": "7", "state": state, "exit_code": None, "started": 5, "ended": None, "nodes": "n1"} | more
    (Path(entry.run_dir) / "state.json").write_text(json.dumps(state_values), encoding="utf-8")


def read_statuses(entry: Entry) -> list[tuple[str, str, str | None, str | None]]:
    (known,) = statuses([entry], connect=nobody)
    return [(record.job_id, record.state.value, record.reason, record.node_list) for record in known.records]


def test_a_job_that_waited_or_ran_ended_with_its_cluster(job: Entry) -> None:
    wrote(job, "RUNNING")
    status.end_all(CONF)
    assert read_statuses(job) == [("7", "CANCELLED", "its cluster was taken down", "n1")]


def test_a_job_that_wrote_its_end_has_that_one(job: Entry) -> None:
    wrote(job, "FAILED", exit_code=3, ended=9)
    status.end_all(CONF)
    assert read_statuses(job) == [("7", "FAILED", None, "n1")]


def test_each_task_of_an_array_that_never_began_is_told(job: Entry) -> None:
    index.add(waiting := replace(job, array="0-1"))
    status.end_all(CONF)
    assert [row[:2] for row in read_statuses(waiting)] == [("7_0", "CANCELLED"), ("7_1", "CANCELLED")]


def test_jobs_of_other_clusters_are_left_alone(job: Entry) -> None:
    status.end_all("/another/slurm.conf")
    with pytest.raises(AssertionError, match="was asked"):
        read_statuses(job)


def test_nobody_is_asked_where_every_end_is_known(job: Entry) -> None:
    status.end_all(CONF)
    status.keep_accounts(CONF, connect=nobody)
    assert (Path(job.run_dir) / "accounting.json").exists()
