"""Which sites ``hpcjobs where`` looks at."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from commandline import ok, within
from scripted_slurm import answer
from slurm_rows import print_rows, queued_row

TOMORROW = 14 * 3600


def test_where_lists_my_sites_and_this_machine_but_no_examples(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_SANDBOX_ROOT", str(here / "no-sandbox"))
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text("partitions: {cpu: {nodes: 4, node: {cpus: 4, mem: 8G}}}\n")
    assert {row["site"] for row in ok("where", "--json", "true").json} == {"local", "mine"}
    assert {row["site"] for row in within("where", "--site", "a10g-box", "--json", "true").json} == {"a10g-box"}


@pytest.fixture
def cluster(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that plans the job for tomorrow although nodes are idle."""
    answers = here / "slurm"
    answers.mkdir()
    start = int(time.time()) + TOMORROW
    answer(answers, "sbatch", f"echo 'sbatch: Job 7 to start at {start} using 2 processors on nodes n[1-2]' >&2")
    answer(answers, "sinfo", "printf 'main 3 idle\nmain 2 planned\nmain 1 idle~\nmain 9 allocated\n'")
    answer(answers, "scontrol", "echo 'PartitionName=main AllowGroups=ALL AllocNodes=ALL Default=NO'")
    (here / "slurm.conf").write_text("ClusterName=c\n")
    site = f"slurm_conf: {here}/slurm.conf\npartitions: {{main: {{nodes: 15, node: {{cpus: 4}}, default: true}}}}\n"
    (here / "site.yaml").write_text(site)
    monkeypatch.setenv("PATH", f"{answers}:/usr/bin:/bin")
    return answers


def test_an_estimate_of_hours_is_not_left_alone_while_nodes_are_idle(cluster: Path) -> None:
    line = ok("submit", "--site", "./site.yaml", "-N", "4", "--test-only", "true").out
    assert "in 13h59m  " in line or "in 14h" in line
    assert "4 nodes are idle now: it may start sooner than Slurm's estimate" in line
    line = ok("submit", "--site", "./site.yaml", "-N", "5", "--test-only", "true").out
    assert "idle" not in line, "there are too few for it"
    line = ok("where", "--site", "./site.yaml", "-N", "4", "true").out
    assert "4 nodes are idle now" in line


def test_a_refusal_of_a_partition_that_takes_no_jobs_from_this_host_says_so(cluster: Path) -> None:
    answer(cluster, "sbatch", "echo 'allocation failure: Access/permission denied' >&2; exit 1")
    answer(cluster, "scontrol", "echo 'PartitionName=main AllowGroups=ALL AllocNodes=head[1-2] Default=NO'")
    refused = within("submit", "--site", "./site.yaml", "--test-only", "true")
    host = os.uname().nodename.partition(".")[0]
    assert refused.code == 7
    assert (
        f"partition main: AllocNodes=head[1-2]: jobs are submitted from these hosts, and this is {host}" in refused.out
    )
    for hosts in (f"head1,{os.uname().nodename}", "head[a-b]"):  # the second is no list of hosts: Slurm decides
        answer(cluster, "scontrol", f"echo 'PartitionName=main AllocNodes={hosts} Default=NO'")
        refused = within("submit", "--site", "./site.yaml", "--test-only", "true")
        assert "Access/permission denied" in refused.out
        assert "AllocNodes" not in refused.out


def test_where_a_plugin_chooses_the_partition_none_is_named(cluster: Path, here: Path) -> None:
    (here / "site.yaml").write_text((here / "site.yaml").read_text() + "chooses_partition: true\n")
    named = "echo 'error: do not name a partition' >&2; echo 'allocation failure: Unspecified error' >&2; exit 1"
    start = f"echo 'sbatch: Job 7 to start at {int(time.time())} using 2 processors on nodes n1' >&2"
    answer(cluster, "sbatch", f'case "$*" in *--partition*) {named} ;; *) {start} ;; esac')
    (row,) = ok("where", "--site", "./site.yaml", "--json", "true").json
    assert (row["partition"], row["is_valid"]) == (None, True)


def test_an_earlier_start_is_looked_for_without_a_partition_where_a_plugin_chooses_it(
    cluster: Path, here: Path
) -> None:
    (here / "site.yaml").write_text((here / "site.yaml").read_text() + "chooses_partition: true\n")
    named = "echo 'error: do not name a partition' >&2; exit 1"
    start = f"echo 'sbatch: Job 7 to start at {int(time.time()) + TOMORROW} using 2 processors on nodes n1' >&2"
    short = start.replace(str(int(time.time()) + TOMORROW), str(int(time.time()) + 60))
    estimates = f"*--partition*) {named} ;; *--time=00:15:00*) {short} ;; *--test-only*) {start} ;;"
    answer(cluster, "sbatch", f'case "$*" in {estimates} *) echo 7 ;; esac')
    run_dir = ok("submit", "--site", "./site.yaml", "-t", "1h", "--json", "true").json["run_dir"]
    row = queued_row(JobName="true", State="PENDING", Reason="Priority", Command=f"{run_dir}/job.sh")
    answer(cluster, "squeue", print_rows(row))
    answer(cluster, "sacct", ":")
    explained = ok("why", "7", "--json").json
    assert [(row["partition"], row["time"]) for row in explained["sooner"]] == [(None, "00:15:00")]
    assert "hpcjobs cancel 7 && hpcjobs rerun 7 --nodes 1 --time 00:15:00" in explained["fix"]
