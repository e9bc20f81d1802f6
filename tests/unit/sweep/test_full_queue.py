"""What a sweep does when the queue refuses its arrays: it waits only where waiting helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import Answer, ok, within
from stub_slurm import StubSlurm, install

SITE = {
    "partitions": {"compute": {"nodes": 4, "node": {"cpus": 16}}},
    "defaults": {"time": "10m"},
    "run_root": "runs",
}


@pytest.fixture(autouse=True)
def site(here: Path) -> Path:
    path = here / "stub.yaml"
    path.write_text(json.dumps(SITE))
    return path


@pytest.fixture(params=[True, False], ids=["limit named", "generic text"])
def named(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def sweep(cells: int) -> Answer:
    answer = within("sweep", "--site", "./stub.yaml", "--name", "s", "--set", f"i=1..{cells}", "--json", "true")
    print(answer)
    return answer


def status() -> dict[str, Any]:
    states: dict[str, Any] = within("sweep", "status", "s", "--json").json["states"]
    return states


@pytest.mark.parametrize("limit_name", ["QOSMaxWallDurationPerJobLimit", ""])
def test_a_sweep_that_is_too_long_for_its_account_is_refused_and_does_not_wait_for_room(
    here: Path, monkeypatch: pytest.MonkeyPatch, limit_name: str
) -> None:
    stub = install(monkeypatch, here / "stubs", limit=100)
    stub.refuse(limit_name)
    stub.add_foreign_job()
    answer = sweep(4)
    assert answer.code == 7
    assert "time limits" in answer.err
    assert stub.queue() == {"7": 1}
    assert status() == {"MISSING": 4}


def test_a_sweep_larger_than_the_account_may_submit_is_cut_until_it_fits(
    here: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Ten cells, six jobs at once; nobody said so in the site file."""
    stub = install(monkeypatch, here / "stubs", limit=6, name_the_limit=named)
    begun = sweep(10).json
    assert 0 < begun["cells"] < 10
    assert begun["cells"] + begun["waiting"] == 10
    _run_to_the_end(stub, monkeypatch)


def test_the_job_that_submits_the_rest_requests_what_the_centre_makes_mandatory(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    centre = tmp_path / "xdg" / "hpcjobs" / "site_configs"
    centre.mkdir(parents=True)
    policy = {"max_nodes": 2, "mandatory": {"mail_type": "FAIL", "time": "30m"}}
    (centre / "stub.yaml").write_text(json.dumps({**SITE, "cluster": "big", "policy": policy}))
    install(monkeypatch, here / "stubs", limit=6)
    (here / "stub.yaml").write_text(json.dumps({**SITE, "defaults": {}}))
    assert sweep(10).json["waiting"] > 0
    script = Path("runs/sweep-s/next-001/job.sh").read_text()
    assert "#SBATCH --mail-type=FAIL" in script
    assert "#SBATCH --time=00:30:00" in script


def _run_to_the_end(stub: StubSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """End what is queued, and let the job that submits the rest do it, as Slurm would: a running job still counts."""
    for _ in range(10):
        *arrays, last = stub.queue()
        for array in arrays:
            stub.end(array)
        if not Path(f"runs/sweep-s/next-{_ + 1:03d}").exists():
            stub.end(last)
            break
        monkeypatch.setenv("HPCJOBS_JOB_ID", last)
        assert within("sweep", "continue", "runs/sweep-s").code == 0
        stub.end(last)
    chunks = [json.loads(path.read_text()) for path in Path("runs/sweep-s/chunks").glob("*/chunk.json")]
    submitted = [
        chunk for chunk in chunks if Path(f"runs/sweep-s/chunks/{chunk['number']:04d}/submitted.json").exists()
    ]
    assert len({cell for chunk in submitted for cell in chunk["cells"]}) == 10
    assert sum(len(chunk["cells"]) for chunk in submitted) == 10


def test_a_queue_that_never_has_room_for_a_sweep_is_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    stub = install(monkeypatch, here / "stubs", limit=1, name_the_limit=named)
    answer = sweep(3)
    assert answer.code == 5
    assert "takes 1 of your jobs" in answer.err
    assert stub.queue() == {}
    assert status() == {"MISSING": 3}


def test_cells_wait_while_other_jobs_of_mine_fill_the_queue(
    here: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    stub = install(monkeypatch, here / "stubs", limit=2, name_the_limit=named)
    stub.add_foreign_job()
    assert sweep(3).json["waiting"] == 3
    assert len(stub.queue()) == 2
    assert status() == {"PENDING": 3}


def test_one_job_that_submits_the_rest_waits_at_a_time_however_often_a_sweep_is_resumed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several would fill a short queue, and follow each other for ever."""
    stub = install(monkeypatch, here / "stubs", limit=6)
    stub.add_foreign_job()
    begun = sweep(10).json
    queued = stub.queue()
    for array in begun["arrays"]:
        stub.end(array)
    for _ in range(3):
        assert within("sweep", "resume", "s").code in (0, 5)
    assert [path.name for path in Path("runs/sweep-s").glob("next-*")] == ["next-001"]
    assert set(queued) - set(begun["arrays"]) <= set(stub.queue())


def test_a_sweep_goes_on_beside_a_held_job_that_would_submit_the_rest(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = install(monkeypatch, here / "stubs", limit=6)
    begun = sweep(10).json
    squeue = here / "stubs" / "squeue"
    squeue.with_name("reason").write_text("JobHeldUser")
    (submitted,) = Path("runs/sweep-s/chunks").glob("*/submitted.json")
    chunk = json.loads((submitted.parent / "chunk.json").read_text())
    for number, cell in enumerate(chunk["cells"]):
        state = {
            "job_id": f"101_{number}",
            "state": "COMPLETED",
            "exit_code": 0,
            "started": 1.0,
            "ended": 2.0,
            "nodes": "n",
        }
        (folder := Path("runs/sweep-s/cells", cell)).mkdir()
        (folder / "state.json").write_text(json.dumps(state))
    for array in begun["arrays"]:
        stub.end(array)
    (here / "stubs" / "limit").write_text("4")
    stub.add_foreign_job()
    assert within("sweep", "resume", "s").code == 0
    assert len(stub.queue()) == 4, "the other job, the held one, an array, and the job after it"
    assert Path("runs/sweep-s/next-002").exists()


def test_cancel_ends_also_a_held_job_that_has_a_successor(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = install(monkeypatch, here / "stubs", limit=8)
    begun = sweep(20).json
    squeue = here / "stubs" / "squeue"
    squeue.with_name("reason").write_text("JobHeldUser")
    for array in begun["arrays"]:
        stub.end(array)
    assert within("sweep", "resume", "s").code == 0
    queued = stub.queue()
    assert len([*Path("runs/sweep-s").glob("next-*")]) == 2
    assert set(ok("sweep", "cancel", "s", "--json").json["cancelled"]) >= set(queued)


def test_a_name_with_a_slash_is_refused_before_a_folder_is_made(here: Path) -> None:
    answer = within("sweep", "run", "--site", "local", "--name", "/../../evil", "--set", "i=1,2", "true")
    assert answer.code == 5
    assert "sweep '/../../evil': the name is a part of its folder's, and cannot have a slash" in answer.err
    assert not Path("runs").exists()


def test_a_node_with_held_in_its_name_holds_no_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, here / "stubs", limit=6)
    sweep(10)
    before = status()
    squeue = here / "stubs" / "squeue"
    squeue.with_name("reason").write_text("ReqNodeNotAvail,UnavailableNodes:sheldon1")
    assert status() == before


def test_cells_whose_submitting_job_was_cancelled_are_missing_and_resume_submits_them(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = install(monkeypatch, here / "stubs", limit=6)
    begun = sweep(10).json
    for job in stub.queue():
        if job not in begun["arrays"]:
            stub.end(job)
    assert status() == {"PENDING": begun["cells"], "MISSING": begun["waiting"]}
    for job in stub.queue():
        stub.end(job)
    assert within("sweep", "resume", "s", "--json").json["cells"] > 0


def test_a_sweep_is_resumed_only_as_the_policy_of_today_allows(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "xdg"))
    stub = install(monkeypatch, here / "stubs", limit=100)
    stub.refuse()
    sweep(4)
    (here / "stubs" / "refuse").unlink()
    centre = tmp_path / "xdg" / "hpcjobs" / "site_configs"
    centre.mkdir(parents=True)
    (centre / "stub.yaml").write_text(json.dumps({**SITE, "cluster": "big", "policy": {"max_time": "5m"}}))
    resumed = within("sweep", "resume", "s")
    assert (resumed.code, stub.queue()) == (5, {})
    assert "a policy of the centre refuses the job:" in resumed.err
    (centre / "stub.yaml").write_text(json.dumps({**SITE, "cluster": "big", "policy": {"max_time": "20m"}}))
    assert within("sweep", "resume", "s").code == 0
    assert sum(stub.queue().values()) == 4


def test_cells_that_an_answer_of_the_queue_lacks_are_not_submitted_again_while_the_controller_has_them(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = install(monkeypatch, here / "stubs", limit=100)
    assert sweep(4).code == 0
    stub.silence_queue()
    resumed = within("sweep", "resume", "s", "--json").json
    assert (resumed["arrays"], resumed["open"], stub.queue()) == ([], 4, {"101": 4})
    stub.end("101")
    assert within("sweep", "resume", "s", "--json").json["cells"] == 4


def test_the_cells_of_a_cancelled_sweep_are_cancelled_also_where_slurm_forgot_them_at_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without accounting: the cells waited, and wrote no end."""
    stub = install(monkeypatch, here / "stubs", limit=8)
    (here / "stubs" / "sacct").write_text("#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    begun = sweep(3).json
    (array,) = begun["arrays"]
    assert array in stub.queue()
    assert ok("sweep", "cancel", "s", "--json").json["cancelled"] == [array]
    assert array not in stub.queue()
    shown = ok("sweep", "status", "s").out
    assert "3 CANCELLED" in shown, shown
