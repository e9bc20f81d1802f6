"""``hpcjobs sites check`` on a real Slurm that is changed under the site file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs, ok

from hpcjobs.processes.programs import run
from hpcjobs.sandbox import Sandbox


def wrong(answer: Answer) -> dict[str, str]:
    return {finding["subject"]: finding["text"] for finding in answer.json["findings"] if finding["verdict"] == "wrong"}


@pytest.fixture
def update(sandbox: Sandbox) -> Iterator[list[str]]:
    """Restores the partition short, which the test changes."""
    command = ["scontrol", "update", "partitionname=short"]
    yield command
    assert run([*command, "state=up", "maxtime=1:00:00"], env={"SLURM_CONF": sandbox.slurm_conf}).code == 0


@pytest.mark.timeout(400)
def test_a_check_with_jobs_is_green_and_red_in_the_right_words_after_the_cluster_has_changed(
    sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch, update: list[str]
) -> None:
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    ok("sites", "init", "ours")
    green = hpcjobs("sites", "check", "ours", "--run", "--json")
    assert green.code == 0, green
    ran = [f["subject"] for f in green.json["findings"] if f["text"].endswith(" ran")]
    assert {"job in short by the default launcher", "job in long by the default launcher"} <= {*ran}

    path = workdir / "home" / ".config" / "hpcjobs" / "site_configs" / "ours.yaml"
    assert run([*update, "maxtime=00:30:00"]).code == 0
    changed = path.read_text(encoding="utf-8").replace("  long:", "  longer:") + "mpi: pmi9\ninterface: ib7\n"
    path.write_text(changed, encoding="utf-8")
    red = hpcjobs("sites", "check", "ours", "--json")
    assert red.code == 1, red
    assert wrong(red)["partitions.short.max_time"] == "is 01:00:00; MaxTime is 00:30:00"
    assert wrong(red)["partitions.longer"].startswith("the cluster has no partition longer; did you mean 'long'?")
    assert wrong(red)["mpi"].startswith("srun --mpi=list has no pmi9; it has ")

    assert run([*update, "state=inactive"]).code == 0
    assert wrong(hpcjobs("sites", "check", "ours", "--json"))["partitions.short"].startswith("takes no jobs of yours")
