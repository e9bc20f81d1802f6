"""The options of `hpcjobs logs`, as a user types them."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest
from commandline import moment, ok, start, within
from scripted_slurm import answer
from terminal import on_terminal
from waiting import eventually

SITE = "{description: two nodes, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"


@pytest.fixture
def run_dir(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of job 42, with two ranks on each of two nodes."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    answers = tmp_path / "slurm"
    answers.mkdir()
    answer(answers, "sbatch", "echo 42")
    monkeypatch.setenv("PATH", f"{answers}:{os.environ['PATH']}")
    ok("submit", "-N", "2", "--ntasks-per-node", "2", "true")
    (folder,) = (here / "runs").glob("true-*")
    (folder / "logs" / "true_42.out").write_text("".join(f"{n % 4}: step {n}\n" for n in range(8)))
    return folder


def write_state(run_dir: Path, nodes: str) -> None:
    state = {"job_id": "42", "state": "RUNNING", "exit_code": None, "started": 1, "ended": None, "nodes": nodes}
    (run_dir / "state.json").write_text(json.dumps(state))


def test_a_node_stands_for_the_ranks_that_run_there(run_dir: Path) -> None:
    answered = within("logs", "--node", "n2")
    assert answered.code == 5
    assert "--node n2: job 42 has not started" in answered.err
    write_state(run_dir, "n[1-2]")
    assert ok("logs", "--node", "n2").out == "2: step 2\n3: step 3\n2: step 6\n3: step 7\n"
    assert ok("logs", "--node", "n1", "-n", "1").out == "1: step 5\n"
    answered = within("logs", "--node", "n3")
    assert answered.code == 5
    assert "--node n3: job 42 ran on n1, n2" in answered.err


def test_lines_are_chosen_by_rank_pattern_and_number(run_dir: Path) -> None:
    assert ok("logs", "--rank", "3", "-n", "1").out == "step 7\n"
    assert ok("logs", "--grep", "^step [45]$").out == "0: step 4\n1: step 5\n"
    assert ok("logs", "-n", "0").out == ""
    assert ok("logs", "--json", "-n", "1").json["lines"] == ["3: step 7\n"]
    answered = within("logs", "--grep", "nothing", "--rank", "1")
    assert (answered.code, answered.out) == (0, "")
    assert "job 42 has no line for --rank 1 --grep nothing" in answered.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grep", "("), "--grep (: no regular expression"),
        (("--since", "soon"), "--since soon: not a time\nhint: write 10m or 2h"),
        (("--since", "1h"), "has a date and a time"),
        (("--rank", "1", "--node", "n1"), "--node and --rank exclude each other"),
        (("--monitor", "-n", "3"), "--monitor is about nodes"),
        (("--merge", "--rank", "1"), "--merge and --rank exclude each other"),
        (("--stderr",), "not which line is of which\nhint: `hpcjobs why JOB`"),
        (("--timestamps",), "--timestamps: a log does not hold the times of its lines\nhint: with -f"),
    ],
)
def test_options_that_cannot_be_used_are_named(run_dir: Path, arguments: tuple[str, ...], message: str) -> None:
    answered = within("logs", *arguments)
    assert (answered.code, answered.out) == (5, "")
    assert message in answered.err


def test_equal_lines_of_several_ranks_can_be_one(run_dir: Path) -> None:
    (run_dir / "logs" / "true_42.out").write_text("".join(f"{n % 4}: epoch {n // 4}\n" for n in range(8)))
    assert ok("logs", "--merge").out == "0-3: epoch 0\n0-3: epoch 1\n"
    assert ok("logs", "--merge", "--tail", "5").out == "3: epoch 0\n0-3: epoch 1\n"


def test_ranks_have_colours_on_a_terminal_and_nowhere_else(run_dir: Path) -> None:
    plain = ok("logs", "-n", "2").out
    assert plain == "2: step 6\n3: step 7\n"
    coloured = on_terminal("logs", "-n", "2", columns=80).out
    assert coloured == "\x1b[35m2:\x1b[0m step 6\n\x1b[32m3:\x1b[0m step 7\n"
    assert on_terminal("logs", "-n", "1", columns=80, NO_COLOR="1").out == "3: step 7\n"
    manifest = run_dir / "manifest.json"
    manifest.write_text(
        manifest.read_text().replace('"ntasks_per_node": 2', '"ntasks_per_node": 1').replace('"nodes": 2', '"nodes": 1')
    )
    assert on_terminal("logs", "-n", "2", columns=80).out == plain, "a program of one task prints its own numbers"


def test_a_line_that_comes_while_a_log_is_followed_begins_with_its_time(here: Path) -> None:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\necho before\nuntil [ -e go ]; do sleep 0.1; done\necho after\n")
    program.chmod(0o755)
    job = ok("submit", "--site", "local", "--json", str(program)).json
    eventually(lambda: "before" in ok("logs", job["job_id"]).out)
    follower = start("logs", "-f", "-t", job["job_id"])
    assert follower.stdout is not None
    assert follower.stdout.readline().strip() == "before"
    (here / "go").touch()
    time, text = follower.communicate(timeout=120)[0].split()
    assert abs(moment(time) - datetime.now().timestamp()) < 120
    assert text == "after"
