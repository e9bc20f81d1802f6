"""Rows of sacct that are no job of their own: of a resized job, and of the siblings of a job of a federation."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from commandline import ok
from sacct_versions import BEGUN, FakeSacct, row, step

SACCT = """#!{python}
import json, sys
options = {{word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:]}}
if "--helpformat" in options:
    print({columns!r})
else:
    for row in json.loads({rows!r}):
        print(options["--delimiter"].join(row[name] for name in options["--format"].split(",")))
"""


@pytest.fixture
def cluster(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text("partitions: {compute: {nodes: 2, node: {cpus: 8, mem: 8G}}}\n")
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    commands = tmp_path / "slurm"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return commands / "sacct"


def account(sacct: Path, *rows: dict[str, str]) -> None:
    columns = " ".join((*FakeSacct().columns, "Cluster"))
    every = [{"Cluster": "a", **one} for one in rows]
    sacct.write_text(SACCT.format(python=sys.executable, columns=columns, rows=json.dumps(every)))
    sacct.chmod(0o755)


RESIZING = row(JobID=7, State="RESIZING", Submit=BEGUN, Eligible=BEGUN, Start=BEGUN + 5, End=BEGUN + 13, ElapsedRaw=8,
               NNodes=2, NCPUS=2, TotalCPU="00:00:08")  # fmt: skip
AFTER = {"JobID": 7, "Submit": BEGUN + 13, "End": BEGUN + 20, "NNodes": 1, "NCPUS": 1, "TotalCPU": "00:00:07"}


@pytest.mark.parametrize(
    "times",
    [
        {"Eligible": BEGUN + 5, "Start": BEGUN + 5, "ElapsedRaw": 15},
        {"Eligible": BEGUN + 13, "Start": BEGUN + 13, "ElapsedRaw": 7},
    ],
    ids=["start of the job", "start of the part"],
)
def test_a_resized_job_is_one_job_of_one_attempt(times: dict[str, int], cluster: Path) -> None:
    rest = row(**AFTER, **times)
    account(cluster, RESIZING, step(RESIZING), rest, step(rest), row(JobID=8))
    job, other = ok("report", "jobs", "7", "8", "--json").json
    assert (other["job_id"], other["elapsed_s"], other["cpu_s"]) == ("8", 3600, 4 * 3600)
    assert (job["submitted"], job["started"]) == ("2026-11-18T11:06:40Z", "2026-11-18T11:06:45Z")
    names = ("state", "queue_wait_s", "elapsed_s", "elapsed_all_s", "attempts", "lost_s")
    assert [job[name] for name in names] == ["COMPLETED", 5, 15, 15, 1, 0]
    assert (job["cpus"], job["cpu_s"], job["goodput"]) == (1, 15, 1)
    assert job["cpu_efficiency"] == pytest.approx(15 / 23)
    (sums,) = ok("report", "jobs", "7", "--by", "user", "--json").json
    assert (sums["jobs"], sums["lost_h"], sums["cpu_h"]) == (1, 0, pytest.approx(23 / 3600))


def test_a_resized_job_that_was_put_back_has_lost_all_parts_of_its_attempt(cluster: Path) -> None:
    rest = row(**{**AFTER, "State": "NODE_FAIL"}, Eligible=BEGUN, Start=BEGUN + 5, ElapsedRaw=15)
    again = row(JobID=7, Submit=BEGUN + 20, Eligible=BEGUN + 20, Start=BEGUN + 30, End=BEGUN + 130, ElapsedRaw=100)
    account(cluster, RESIZING, rest, again)
    (job,) = ok("report", "jobs", "7", "--json").json
    assert [job[name] for name in ("attempts", "elapsed_s", "elapsed_all_s", "lost_s")] == [2, 100, 115, 15]
    (sums,) = ok("report", "jobs", "7", "--by", "user", "--json").json
    assert (sums["jobs"], sums["failed"]) == (1, 0)


def test_jobs_of_two_clusters_that_the_environment_names_are_two(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account(cluster, row(JobID=5), row(JobID=5, Cluster="b", Submit=BEGUN + 10))
    monkeypatch.setenv("SLURM_CLUSTERS", "a,b")
    assert [job["cluster"] for job in ok("report", "jobs", "5", "--json").json] == ["a", "b"]


@pytest.mark.parametrize("clusters", [(), ("--all-clusters",)], ids=["own", "all"])
def test_a_job_that_another_cluster_of_the_federation_ran_is_that_job(clusters: tuple[str, ...], cluster: Path) -> None:
    revoked = row(JobID=9, State="REVOKED", Cluster="b", Start="Unknown", End=BEGUN + 60, ElapsedRaw=0)
    account(cluster, row(JobID=9), revoked)
    (job,) = ok("report", "jobs", "9", *clusters, "--json").json
    assert (job["state"], job["attempts"], job["elapsed_s"], job["queue_wait_s"]) == ("COMPLETED", 1, 3600, 60)
    sums = ok("report", "jobs", "9", *clusters, "--by", "user", "--json").json
    assert [(one["jobs"], one["mean_wait_s"]) for one in sums] == [(1, 60)]
    account(cluster, revoked)
    assert [job["state"] for job in ok("report", "jobs", "9", *clusters, "--json").json] == ["REVOKED"]


def test_sums_by_day_are_in_the_order_of_the_days(cluster: Path) -> None:
    ends = [(1, BEGUN + 3 * 86400, 10), (2, BEGUN + 86400, 99), (3, BEGUN + 2 * 86400, 50)]
    account(cluster, *(row(JobID=number, End=end, ElapsedRaw=elapsed) for number, end, elapsed in ends),
            row(JobID=4, State="RUNNING", End="Unknown"))  # fmt: skip
    for by in ("day", "user,day"):
        groups = [row["group"] for row in ok("report", "jobs", "1", "2", "3", "4", "--by", by, "--json").json]
        assert groups == sorted(groups)
        assert len(groups) == 4
