"""A controller that is gone, slow or stopped, and an accounting that does not answer."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from commandline import start
from login_node import Cluster
from waiting import eventually


def site_with(cluster: Cluster, **changes: str) -> str:
    """A site file for the same cluster, whose slurm.conf differs in ``changes``."""
    conf = Path(cluster.record.slurm_conf).read_text()
    for key, value in changes.items():
        conf = re.sub(rf"^{key}=.*\n", "", conf, flags=re.MULTILINE) + f"{key}={value}\n"
    changed = cluster.folder / "slurm.conf"
    changed.write_text(conf)
    shown = cluster.hpcjobs("sites", "show", "tu-hpc", "--json").json
    settings = {key: shown[key] for key in ("partitions", "defaults", "mpi", "interface", "python", "node_local")}
    site = cluster.folder / "changed.yaml"
    site.write_text(json.dumps({**settings, "slurm_conf": str(changed)}))
    return str(site)


@pytest.mark.parametrize("verb", [("submit", "true"), ("ps",)])
def test_a_controller_that_nobody_reaches_gives_one_clear_error(cluster: Cluster, verb: tuple[str, ...]) -> None:
    site = site_with(cluster, SlurmctldPort="1", MessageTimeout="2")
    answer = cluster.hpcjobs(verb[0], "--site", site, *verb[1:])
    assert answer.code == 8, answer
    assert answer.err.count("no answer from Slurm") == 1
    assert "is the controller up?" in answer.err
    assert "Traceback" not in answer.err
    assert not list((cluster.folder / "runs").glob("true-*"))


def test_a_submission_that_timed_out_but_was_heard_is_not_sent_twice(cluster: Cluster) -> None:
    site = site_with(cluster, MessageTimeout="3")
    controller = cluster.record.controller_pid
    os.kill(controller, signal.SIGSTOP)
    try:
        process = start("submit", "--site", site, "--json", "sleep", "600", cwd=cluster.folder)
        eventually(lambda: "squeue" in children_of(process.pid), timeout_s=240)
    finally:
        os.kill(controller, signal.SIGCONT)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    job = cluster.took(out)
    sent = cluster.slurm("squeue", "-h", "--me", "-o", "%i %o").splitlines()
    assert [line for line in sent if str(job.run_dir) in line] == [f"{job.id} {job.run_dir}/job.sh"]


def children_of(pid: int) -> str:
    """The names of the programs that ``pid`` runs."""
    ids = [child for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return " ".join(Path(f"/proc/{child}/comm").read_text() for child in ids if Path(f"/proc/{child}/comm").exists())


def test_waiting_outlasts_a_controller_that_stops_for_a_while(cluster: Cluster) -> None:
    go, begun = cluster.folder / "go", cluster.folder / "begun"
    site = site_with(cluster, MessageTimeout="30")  # as long as srun tells the controller of its end
    answer = cluster.hpcjobs(
        *("submit", "--site", site, "--json"),
        "bash",
        "-c",
        f"touch {begun}; until [ -e {go} ]; do sleep 0.1; done; exit 4",
    )
    job = cluster.took(answer.out)
    eventually(begun.exists)
    os.kill(cluster.record.controller_pid, signal.SIGSTOP)
    try:
        process = start("wait", job.id, cwd=cluster.folder)
        eventually(lambda: "squeue" in children_of(process.pid), timeout_s=240)
        go.touch()
        eventually(lambda: job.state["state"] == "FAILED")
    finally:
        time.sleep(0.1)
        os.kill(cluster.record.controller_pid, signal.SIGCONT)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 4, err


def test_without_accounting_the_controller_and_the_job_tell_the_end(cluster: Cluster) -> None:
    site = site_with(cluster, AccountingStoragePort="1", MessageTimeout="2")
    answer = cluster.hpcjobs("submit", "--site", site, "--json", "bash", "-c", "exit 6")
    job = cluster.took(answer.out)
    end = job.wait()
    assert end.code == 6, end
    (row,) = cluster.rows("--site", site)
    assert (row["record"]["state"], row["record"]["exit_code"]) == ("FAILED", 6)
