"""A sweep's folder that came with somebody's files: it is read, and none of its words becomes a command of the user."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commandline import hpcjobs, ok, within
from stub_slurm import StubSlurm, install

from hpcjobs.errors import RequestError


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubSlurm:
    return install(monkeypatch, tmp_path / "stubs", limit=100)


@pytest.fixture
def foreign(here: Path, tmp_path: Path, slurm: StubSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep that somebody else has submitted, on a cluster of a configuration of theirs."""
    (here / "evil.conf").write_text("PluginDir=.\n")
    site = {"partitions": {"main": {"nodes": 4, "node": {"cpus": 16}}}, "slurm_conf": str(here / "evil.conf")}
    (here / "site.yaml").write_text(json.dumps({**site, "run_root": "runs"}))
    with monkeypatch.context() as other:
        other.setenv("HOME", str(tmp_path))
        ok("sweep", "--site", "./site.yaml", "--name", "s", "-t", "5m", "--set", "i=1,2", "true")
    for command in ("squeue", "sacct", "scontrol", "scancel", "sbatch"):
        text = (path := tmp_path / "stubs" / command).read_text()
        path.write_text(text.replace("\n", f'\necho "$SLURM_CONF" >>{tmp_path}/confs\n', 1))
    return here / "runs/sweep-s"


def test_the_status_of_a_foreign_sweep_starts_no_command_with_its_configuration_and_records_nothing(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "2 PENDING" in ok("sweep", "status", "runs/sweep-s").out
    assert "PENDING" in ok("sweep", "results", "runs/sweep-s").out
    assert {*(tmp_path / "confs").read_text().splitlines()} == {""}
    monkeypatch.setenv("SLURM_CONF", conf := str(foreign.parents[1] / "evil.conf"))
    ok("sweep", "status", "runs/sweep-s")
    assert conf in (tmp_path / "confs").read_text().split(), "the user names it"
    monkeypatch.delenv("SLURM_CONF")
    (foreign / "chunks/0001/submitted.json").unlink()
    (foreign / "chunks/0001/owner").write_text("101\n")
    assert "2 MISSING" in ok("sweep", "status", "runs/sweep-s").out
    assert "run folder" not in ok("show", "101").out, "the queue has it; it is no job of ours"


@pytest.mark.parametrize("name", ["../../out/x", "/ABSOLUTE/x", "s"])
def test_the_page_of_a_foreign_sweep_lies_in_the_current_folder_whatever_its_name(
    foreign: Path, here: Path, tmp_path: Path, name: str
) -> None:
    """Neither the name nor a link that somebody has put there before leads the page elsewhere."""
    own = tmp_path / "own"
    own.write_text("mine")
    (here / "s-report").mkdir()
    for file in ("index.html", "results.csv", "results.parquet"):
        (here / "s-report" / file).symlink_to(own)
    definition = json.loads((foreign / "sweep.json").read_text())
    (cell, _) = json.loads((foreign / "chunks/0001/chunk.json").read_text())["cells"]
    (foreign / "cells" / cell).mkdir()
    (foreign / "cells" / cell / "summary.json").write_text('{"loss": 0.5}')
    state = {"job_id": "1_0", "state": "COMPLETED", "exit_code": 0, "started": 1, "ended": 2, "nodes": "n1"}
    (foreign / "cells" / cell / "state.json").write_text(json.dumps(state))
    definition["name"] = name.replace("/ABSOLUTE", str(tmp_path / "out"))
    (foreign / "sweep.json").write_text(json.dumps(definition))
    ok("report", "sweep", "runs/sweep-s")
    assert len([page for page in here.glob("*-report/index.html") if not page.is_symlink()]) == 1
    assert own.read_text() == "mine"
    assert not (tmp_path / "out").exists()
    assert not (here.parents[1] / "out").exists()


@pytest.mark.parametrize(
    "name",
    ["completed.json", "tail.json", "chunks/0001/chunk.json", "chunks/0001/submitted.json", "chunks/x",
     "chunks/0001/owner", "cells/CELL/error.txt", "cells/CELL/state.json", "cells/CELL/summary.json"],
)  # fmt: skip
def test_pipes_in_a_foreign_sweep_stop_no_verb(foreign: Path, name: str) -> None:
    (cell, _) = json.loads((foreign / "chunks/0001/chunk.json").read_text())["cells"]
    (foreign / "cells" / cell).mkdir()
    path = foreign / name.replace("CELL", cell)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if name.endswith("owner"):
        (foreign / "chunks/0001/submitted.json").unlink()
    for verb in ("status", "results"):
        answer = hpcjobs("sweep", verb, "runs/sweep-s", timeout_s=60)
        assert answer.code != 70, answer
        if answer.code:
            assert f"{path} cannot be used: no regular file" in answer.err


def test_a_size_that_a_foreign_sweep_does_not_have_is_an_error_with_a_message(foreign: Path) -> None:
    chunk = foreign / "chunks/0001/chunk.json"
    chunk.write_text(json.dumps({**json.loads(chunk.read_text()), "size": "x\x1b[2J"}))
    answer = within("sweep", "results", "runs/sweep-s")
    assert (answer.code, "a chunk names the size" in answer.err) == (4, True), answer
    assert "\x1b" not in answer.err


@pytest.mark.parametrize("verb", ["resume", "continue", "cancel"])
def test_a_foreign_sweep_submits_and_cancels_nothing(foreign: Path, slurm: StubSlurm, verb: str) -> None:
    before = slurm.queue()
    answer = within("sweep", verb, "./runs/sweep-s")
    assert answer.code == RequestError.exit_code, answer
    assert f"{foreign} holds a sweep that you have not submitted" in answer.err
    assert slurm.queue() == before


def test_a_sweep_of_the_same_name_is_not_put_into_a_foreign_folder(foreign: Path, slurm: StubSlurm) -> None:
    before = slurm.queue()
    again = ("sweep", "--site", "./site.yaml", "-t", "5m", "--set", "i=1,2,3")
    answer = within(*again, "--name", "s", "true")
    assert (answer.code, slurm.queue()) == (RequestError.exit_code, before), answer
    assert "another --name" in answer.err
    (foreign / "sweep.json").unlink()
    refused = within(*again, "--name", "s", "true")
    assert (refused.code, slurm.queue()) == (RequestError.exit_code, before), "its chunks would be submitted"
    ok(*again, "--name", "mine", "true")
    ok("sweep", "cancel", "mine")
    (foreign.parent / "link").symlink_to(foreign.parent / "sweep-mine")
    ok("sweep", "resume", "runs/link")


def test_a_job_of_the_sweep_submits_its_rest_also_where_the_home_is_another(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(foreign / "next-001"))
    ok("sweep", "continue", str(foreign))


def test_a_folder_that_holds_only_a_job_of_mine_is_no_sweep_of_mine(here: Path) -> None:
    """As a login host can plant by `fetch`: a sweep there would end that job, as the one that submits its rest."""
    victim = Path(ok("submit", "--site", "local", "--json", "sleep", "60").json["run_dir"])
    (planted := here / "runs" / "sweep-u" / "next-001").mkdir(parents=True)
    (planted / "submitted.json").write_bytes((victim / "submitted.json").read_bytes())
    run = within("sweep", "run", "--site", "local", "--name", "u", "--set", "i=1", "--", "true")
    assert (run.code, "that you have not submitted" in run.err) == (5, True), run
    assert within("sweep", "cancel", "u").code != 0
    ok("cancel", "L1")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_sweep_that_another_user_put_in_the_place_of_a_removed_one_is_foreign(here: Path) -> None:
    ok("sweep", "--site", "local", "--name", "s", "-t", "5m", "--set", "i=1,2", "true")
    ok("sweep", "resume", "s")
    os.chown(next(here.rglob("sweep-s")), 54321, 54321)
    answer = hpcjobs("sweep", "resume", "s")
    assert (answer.code, "that you have not submitted" in answer.err) == (5, True)
