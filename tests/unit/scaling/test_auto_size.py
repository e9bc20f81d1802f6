"""``submit`` with ``auto`` on this machine: trials are jobs, earlier runs count, and the run has what was found."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import await_answer, ok, start, within
from scripted_slurm import answer
from waiting import eventually

from hpcjobs.job.plan import resolve_request
from hpcjobs.run import job_files
from hpcjobs.run.index import Entry, entries
from hpcjobs.run.wait import wait
from hpcjobs.scaling import earlier_runs
from hpcjobs.scaling.earlier_runs import TRIAL, EarlierRun, find_runs
from hpcjobs.scaling.right_size import right_size
from hpcjobs.scheduler.base import JobRecord, State, connect

SLOWER_AT_3 = """
import os
n = int(os.environ["WORLD_SIZE"])
rate = 4 * (n if n < 3 else 1.2)
if os.environ["RANK"] == "0":
    print("rate", rate)
"""
METRIC = ("--metric", r"rate (\S+)")
BARE = ("submit", "--site", "local", "-t", "1h", "--ntasks-per-node", "auto")
AUTO = (*BARE, *METRIC)


@pytest.fixture(autouse=True)
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A queue of its own with room for three trials at once, which is empty again at the end."""
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "12")
    Path("rate.py").write_text(SLOWER_AT_3)
    yield
    local = connect("local", None)
    local.cancel({record.job_id for record in local.queue()})
    wait(entries(), timeout_s=300)


def trials() -> list[Entry]:
    return [entry for entry in entries() if entry.name.endswith(TRIAL)]


def find(*program: str) -> list[EarlierRun]:
    job = resolve_request(program, "local", metric=METRIC[1:] if program[0] == "rate.py" else ())
    return find_runs(job, axis="ntasks_per_node", code=None)


def submit_and_wait(*arguments: str) -> None:
    metric = METRIC if "rate.py" in arguments else ()
    job_id = ok("submit", "--site", "local", *metric, "--json", *arguments).json["job_id"]
    within("wait", job_id)


def test_the_size_is_measured_once_and_remembered_with_its_reasons() -> None:
    submitted = ok(*AUTO, "--json", "rate.py").json
    size = submitted["size"]
    assert size["options"] == {"ntasks_per_node": "2"}
    assert "at 3" in size["reasons"][0]
    assert [row["value"] for row in size["sizes"]] == ["1", "2", "3", "4"]
    assert size["cost_node_s"] < size["budget_node_s"] == 180
    assert json.loads((Path(submitted["run_dir"]) / "size.json").read_text())["reasons"] == size["reasons"]
    assert ok("show", submitted["job_id"], "--json").json["settings"]["ntasks_per_node"] == [
        "2", f"auto: {size['reasons'][0]}",
    ]  # fmt: skip
    count = len(trials())
    again = ok(*AUTO, "--explain", "rate.py")
    assert f"auto: {size['reasons'][0]}" in again.out
    assert "cost in all" in again.err
    assert ok(*AUTO, "--dry-run", "--json", "rate.py").json["job"]
    assert len(trials()) == count


def test_no_more_tasks_are_tried_than_the_machine_has_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "2")
    Path("rate.py").write_text(SLOWER_AT_3.replace("1.2)", "n)"))
    size = ok(*AUTO, "--json", "rate.py").json["size"]
    assert size["options"] == {"ntasks_per_node": "2"}
    assert size["reasons"] == ["100% efficient at 2 tasks per node; more are not allowed"]


def test_an_interrupted_command_goes_on_with_its_trials() -> None:
    process = start(*AUTO, "rate.py")
    eventually(lambda: len(trials()) > 0)
    process.send_signal(signal.SIGINT)
    interrupted = await_answer(process, timeout_s=300)
    assert interrupted.code == 130
    assert "the trials continue" in interrupted.err or "job L1 was submitted before" in interrupted.err
    size = ok(*AUTO, "--json", "rate.py").json["size"]
    assert size["options"] == {"ntasks_per_node": "2"}
    assert next(row["runs"] for row in size["sizes"] if row["value"] == "1") in (3, 6, 9)
    assert {entry.job_id for entry in trials()} == set(size["trials"])


def test_a_study_of_the_program_is_what_is_known_of_it() -> None:
    ok("scale", "--site", "local", "--ntasks-per-node", "1,2,3", *METRIC, "--name", "s", "--wait", "rate.py")
    plan = ok(*AUTO, "--dry-run", "--json", "rate.py").json
    assert plan["job"]["ntasks_per_node"] == 2
    assert trials() == []


def test_a_program_without_a_figure_is_refused_with_what_to_add() -> None:
    refused = within(*BARE, "true")
    assert refused.code == 5
    assert "the program has no figure of merit: job" in refused.err
    assert "add --metric" in refused.err
    assert len(trials()) == len(entries()) == 3


def test_a_size_whose_trials_print_the_figure_and_fail_is_said_to_fail() -> None:
    Path("rate.py").write_text(SLOWER_AT_3 + "raise SystemExit(n > 1)\n")
    size = ok(*AUTO, "--json", "rate.py").json["size"]
    assert size["options"] == {"ntasks_per_node": "1"}
    assert "trials of 2 tasks per node failed (job L" in size["reasons"][0]


def test_a_second_figure_does_not_stand_for_the_first_one_of_the_command_line() -> None:
    refused = within(*BARE, "--metric", r"speed (\S+)", *METRIC, "rate.py")
    assert refused.code == 5
    assert "figure speed: no line of the log has it" in " ".join(refused.err.split())


def test_the_run_continues_from_the_checkpoints_of_its_trial() -> None:
    Path("train.py").write_text(
        "import time\n"
        "from hpcjobs.runtime import start\n"
        "run = start()\n"
        "state = run.load() or {'step': 0}\n"
        "print('begins at', state['step'])\n"
        "for step in range(run.step + 1, run.step + 5):\n"
        "    time.sleep(0.2 * run.env.world_size)\n"
        "    run.log(step, samples=10)\n"
        "    run.save(step, {'step': step})\n"
        "run.finish()\n"
    )
    submitted = ok(*BARE, "--json", "train.py").json
    assert submitted["size"]["options"] == {"ntasks_per_node": "1"}
    assert submitted["size"]["resumes_from"] is not None
    within("wait", submitted["job_id"])
    assert "begins at 4" in ok("logs", submitted["job_id"]).out


def test_runs_count_whatever_their_length_but_not_of_other_arguments_or_an_edited_program() -> None:
    submit_and_wait("rate.py", "--epochs", "3", "--lr", "0.1")
    submit_and_wait("rate.py", "--epochs=5", "--seed", "7", "--lr", "0.1")
    submit_and_wait("rate.py", "--lr", "0.2")
    submit_and_wait("--env", "A=1", "rate.py", "--lr", "0.1")
    assert len(find("rate.py", "--lr", "0.1")) == 2
    assert len(find("rate.py", "--lr", "0.2", "--steps", "10")) == 1
    os.utime("rate.py", (os.stat("rate.py").st_mtime + 100,) * 2)
    assert find("rate.py", "--lr", "0.1") == []


def test_the_files_that_the_tasks_of_an_array_share_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    submit_and_wait("--array", "0-3", "true")
    read: list[str] = []

    def read_ends(entry: Entry) -> list[JobRecord]:
        read.append(entry.job_id)
        return job_files.read_ends(entry)

    monkeypatch.setattr(earlier_runs, "read_ends", read_ends)
    assert [(run.job_id, run.state) for run in find("true")] == [(f"L1_{n}", State.COMPLETED) for n in range(4)]
    assert read == ["L1"]
    assert list(right_size(["L1"])) == [f"L1_{n}" for n in range(4)]
    assert read == ["L1", "L1"]


def test_a_run_that_its_time_limit_ended_has_the_figure_of_its_last_lines() -> None:
    Path("lines.py").write_text(
        "import json, os, time\n"
        "file = open(os.environ['HPCJOBS_RUN_DIR'] + '/metrics.jsonl', 'a')\n"
        "line = lambda **values: print(json.dumps(values), file=file, flush=True)\n"
        "line(kind='run', time_s=0, total_steps=100)\n"
        "for step in range(1, 4):\n"
        "    line(kind='step', step=step, time_s=step / 10, throughput=step * 10.0, unit='it/s')\n"
        "time.sleep(600)\n"
    )
    submit_and_wait("-t", "3s", "lines.py")
    (run,) = find("lines.py")
    assert (run.state, run.throughput, run.unit) == (State.TIMEOUT, 20.0, "it/s")
    assert run.duration_s == pytest.approx(10)


def test_a_dry_run_asks_nothing_of_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("sbatch", "squeue", "sacct", "sinfo", "scontrol"):
        answer(answers, command, "exit 1")
    monkeypatch.setenv("PATH", f"{answers}:{os.environ['PATH']}")
    Path("c.yaml").write_text("{partitions: {main: {nodes: 8, node: {cpus: 4, mem: 8G}}}, node_local: []}\n")
    proposal = ok("submit", "--site", "c.yaml", "-t", "10h", "-N", "auto", "--finish-by", "9h", "--dry-run", "--json",
                  "rate.py")  # fmt: skip
    assert "; " not in proposal.err.split("not counted")[0].split("hpcjobs: ")[-1]
    assert proposal.json["next_trial"] == "3 trials of 1 node, 1m00s at most each"
    assert not list(answers.glob("*.asked"))
    assert entries() == []


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("-c", "few", "true"), "'few' is not a valid integer"),
    (("--min-efficiency", "0.5", "true"), "need -N auto"),
    (("-c", "auto", "--min-efficiency", "80", "-t", "1h", "true"), "--min-efficiency 80 is not allowed"),
    (("-c", "auto", "--array", "0-3", "-t", "1h", "true"), "this is an array or a batch script"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], text: str) -> None:
    refused: Any = within("submit", "--site", "local", *arguments)
    assert refused.code in (2, 5)
    assert text in refused.err
    assert entries() == []
