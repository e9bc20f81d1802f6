"""The same run again, and what differs between two runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commandline import ok, within
from scripted_slurm import answer

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


def test_changed_budgets_are_shown_as_they_are_typed() -> None:
    submit("--retries", "on", "true")
    changed = ok("rerun", "L1", "--retries", "node=7").err
    assert "retries: timeout=∞,preempt=∞,node=3,error=0 -> timeout=∞,preempt=∞,node=7,error=0" in changed


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


def give_to_eve(run_dir: Path, folder: Path) -> Path:
    """A copy of a run in ``folder``, as if a colleague had submitted it from there."""
    theirs = folder / run_dir.name
    shutil.copytree(run_dir, theirs)
    for name in ("manifest.json", "submitted.json"):
        content = json.loads((theirs / name).read_text())
        content["user"] = "eve"
        if name == "manifest.json":
            content["job"]["run_root"] = str(folder)
        else:
            content["run_dir"] = str(theirs)
        (theirs / name).write_text(json.dumps(content))
    script = theirs / "job.sh"
    script.write_text(script.read_text().replace(str(run_dir), str(theirs)))
    return theirs


@pytest.mark.parametrize("change", [(), ("--time", "5m")], ids=["exact", "changed"])
def test_the_rerun_of_a_colleagues_run_lies_in_folders_of_mine(
    here: Path, tmp_path: Path, change: tuple[str, ...]
) -> None:
    theirs = give_to_eve(Path(submit("true")["run_dir"]), tmp_path / "eve")
    answer = ok("rerun", str(theirs), "--trust", *change, "--wait", "--json")
    assert Path(answer.json["run_dir"]).parent == here / "runs"
    assert f"a run of eve: its settings (account, mail) stay, the new run folder lies in {here / 'runs'}" in answer.err
    assert len(list((tmp_path / "eve").iterdir())) == 1


def test_a_run_folder_that_was_moved_has_the_same_script(here: Path, tmp_path: Path) -> None:
    first, second = Path(submit("true")["run_dir"]), Path(submit("true")["run_dir"])
    moved = tmp_path / "archive" / first.name
    shutil.copytree(first, moved)
    record = json.loads((moved / "submitted.json").read_text())
    (moved / "submitted.json").write_text(json.dumps({**record, "run_dir": str(moved)}))
    (moved / "job.sh").write_text((moved / "job.sh").read_text() + "echo by hand\n")
    shown = ok("diff", str(moved), str(second)).out.splitlines()
    assert [line.strip() for line in shown if line.strip()[:1] in "+-" and "job.sh" not in line] == ["-echo by hand"]


def test_untracked_files_with_odd_names_neither_stop_a_submission_nor_reach_the_terminal(here: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=here, check=True)
    (here / ".gitignore").write_text("*\n!*.py\n")
    submit("true")
    for name in (b"a\xff.py", b"\x1b[31mred.py", b"two\nlines.py"):
        with open(os.path.join(os.fsencode(here), name), "w"):
            pass
    submit("true")
    shown = ok("diff", "L1", "L2").out
    assert r"a\xff.py" in shown
    assert r"\x1b[31mred.py" in shown
    assert r"two\nlines.py" in shown


def test_a_rerun_of_one_task_of_an_array_submits_that_task_alone(here: Path) -> None:
    program = here / "task.sh"
    program.write_text("#!/bin/bash\necho $SLURM_ARRAY_TASK_ID >>tasks\n")
    program.chmod(0o755)
    submit("--array", "0-3", "./task.sh")
    (here / "tasks").unlink()
    ok("rerun", "L1_3", "--wait")
    ok("rerun", "L1_2", "--time", "10m", "--wait")
    assert (here / "tasks").read_text().split() == ["3", "2"]


@pytest.mark.parametrize("changes", [(), ("--time", "5m")])
def test_the_rerun_of_a_held_job_is_not_held(
    here: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...]
) -> None:
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "description: two nodes\npartitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}\n"
    )
    for command in ("squeue", "sacct", "scontrol"):
        answer(here, command, ":")
    answer(here, "sbatch", "echo 12")
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    ok("submit", "--site", "mine", "--no-check", "-o", "hold=1", "true")
    again = ok("rerun", "12", *changes, "--dry-run")
    assert "left out: hold" in again.err
    assert "--hold" not in again.out


def test_a_rerun_of_a_snapshot_with_changes_runs_the_code_of_then(here: Path) -> None:
    project = here / "project"
    project.mkdir()
    (project / "say.sh").write_text("#!/bin/bash\necho first >>$SAID\n")
    (project / "say.sh").chmod(0o755)
    first = json.loads(
        ok("submit", "--site", "local", "--launcher", "spawn", "--snapshot", "--env", f"SAID={here}/said", "--wait",
           "--json", "--chdir", "project", "./say.sh").out
    )  # fmt: skip
    (project / "say.sh").unlink()
    again = json.loads(ok("rerun", "L1", "--time", "10m", "--wait", "--json").out)
    assert (here / "said").read_text().split() == ["first", "first"]
    assert Path(again["run_dir"]).parent == Path(first["run_dir"]).parent


def test_every_result_that_differs_is_shown_whatever_its_name(here: Path) -> None:
    """A name may contain that of something else: ``report_f1`` contains ``port``."""
    names = ("report_f1", "transport_cost", "step_time_s", "host_loss")
    for number in (1, 2):
        folder = Path(submit("true")["run_dir"])
        results = dict.fromkeys(names, number + 0.5) | {"started_at": number, "hosts": [f"n{number}"]}
        (folder / "summary.json").write_text(json.dumps({"schema": "hpcjobs.summary/1", **results}))
    changes = ok("diff", "L1", "L2", "--json").json["results"]
    assert changes == [{"name": name, "first": "1.5", "second": "2.5"} for name in names]


def test_the_end_and_the_results_of_a_task_are_not_those_of_its_array() -> None:
    program = """echo "{\\"loss\\": $1.5}" >"$HPCJOBS_RUN_DIR/summary.json"; exit $1"""
    within(*LOCAL, "--array", "0-1", "bash", "-c", f"set $SLURM_ARRAY_TASK_ID; {program}")
    for line, differs in (("L1_0 L1_1", {"state", "exit code", "loss"}), ("L1 L1", set()), ("L1_1 L1_1", set())):
        changes = ok("diff", *line.split(), "--json").json["results"]
        assert {change["name"] for change in changes} == differs, line
    shown = ok("diff", "L1_0", "L1_1").out
    assert shown.startswith("L1_0 -> L1_1\n")
    assert "  loss: 0.5 -> 1.5\n" in shown
    assert "  loss: - -> 1.5\n" in ok("diff", "L1", "L1_1").out
