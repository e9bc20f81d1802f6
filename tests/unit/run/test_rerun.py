"""The same run again, and what differs between two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commandline import ok, within

LOCAL = ("submit", "--site", "local", "--launcher", "spawn", "--wait", "--json")


def submit(*arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(ok(*LOCAL, *arguments).out)
    return answer


def losses(run_dir: str) -> list[float]:
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_two_runs_that_differ_in_one_environment_variable_differ_in_exactly_that() -> None:
    first, second = submit("--env", "LR=0.1", "true"), submit("--env", "LR=0.2", "true")
    assert ok("diff", first["job_id"], second["job_id"]).out == "L1 -> L2\nenvironment:\n  env.LR: 0.1 -> 0.2\n"
    difference = ok("diff", first["job_id"], second["job_id"], "--json").json
    assert difference.pop("environment") == [{"name": "env.LR", "first": "0.1", "second": "0.2"}]
    assert not any(difference.values())


def test_two_equal_runs_do_not_differ() -> None:
    submit("true")
    submit("true")
    assert ok("diff", "L1", "L2").out == "no difference between L1 and L2\n"


def test_how_two_runs_ended_is_part_of_the_difference(here: Path) -> None:
    program = here / "end.sh"
    program.write_text("#!/bin/bash\nexit $CODE\n")
    program.chmod(0o755)
    submit("--env", "CODE=0", "./end.sh")
    within(*LOCAL, "--env", "CODE=3", "./end.sh")
    results = ok("diff", "L1", "L2", "--json").json["results"]
    assert {"name": "state", "first": "COMPLETED", "second": "FAILED"} in results
    assert {"name": "exit code", "first": "0", "second": "3"} in results


def test_an_edited_script_is_shown_with_its_lines() -> None:
    first, second = submit("true"), submit("true")
    script = Path(second["run_dir"], "job.sh")
    script.write_text(script.read_text() + "echo by hand\n")
    assert "+echo by hand" in ok("diff", first["job_id"], second["job_id"]).out


def test_a_rerun_has_the_same_settings_and_one_with_a_change_says_which(here: Path) -> None:
    submit("--env", "LR=0.1", "--time", "10m", "true")
    exact = ok("rerun", "L1", "--wait", "--json")
    assert "changed" not in exact.err
    assert ok("diff", "L1", "L2").out == "no difference between L1 and L2\n"
    changed = ok("rerun", "L1", "--time", "20m", "--env", "LR=0.2", "--wait")
    assert "hpcjobs: changed: time: 00:10:00 -> 00:20:00\n" in changed.err
    assert "hpcjobs: changed: env.LR: 0.1 -> 0.2\n" in changed.err
    difference = ok("diff", "L1", "L3", "--json").json
    assert [change["name"] for change in (*difference["settings"], *difference["environment"])] == ["time", "env.LR"]
    assert "#SBATCH" not in ok("rerun", "L1", "--dry-run").out
    assert len(list(here.glob("runs/true-*"))) == 3


def test_a_rerun_from_another_folder_runs_where_the_first_one_did(here: Path, tmp_path: Path, monkeypatch: Any) -> None:
    program = here / "where.sh"
    program.write_text("#!/bin/bash\npwd >>places\n")
    program.chmod(0o755)
    submit("./where.sh")
    monkeypatch.chdir(tmp_path)
    ok("rerun", "L1", "--wait")
    ok("rerun", "L1", "--env", "X=1", "--wait")
    assert (here / "places").read_text().splitlines() == [str(here)] * 3


def test_a_rerun_of_a_snapshot_runs_the_code_of_then(here: Path) -> None:
    program = here / "version.sh"
    program.write_text("#!/bin/bash\necho first\n")
    program.chmod(0o755)
    submit("--snapshot", "./version.sh")
    program.write_text("#!/bin/bash\necho second\n")
    ok("rerun", "L1", "--wait")
    assert ok("logs", "L2").out.strip().endswith("first")


def test_a_run_folder_without_a_manifest_is_an_error_that_names_it(here: Path) -> None:
    run_dir = submit("true")["run_dir"]
    Path(run_dir, "manifest.json").unlink()
    for arguments in (("rerun", "L1"), ("diff", "L1", "L1")):
        answer = within(*arguments)
        assert answer.code == 5
        assert f"{run_dir}/manifest.json" in answer.err


def test_a_rerun_of_a_training_has_the_same_losses() -> None:
    first = submit("ddp", "--workload", "lm", "--steps", "3", "--batch-size", "4", "--log-every", "1")
    again = ok("rerun", first["job_id"], "--wait", "--json").json
    assert len(losses(first["run_dir"])) == 3
    assert losses(again["run_dir"]) == losses(first["run_dir"])
