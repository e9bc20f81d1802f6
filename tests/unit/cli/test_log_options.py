"""The options of `hpcjobs logs`, as a user types them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commandline import ok, within
from scripted_slurm import answer

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
    ("words", "message"),
    [
        (("--grep", "("), "--grep (: no regular expression"),
        (("--since", "soon"), "--since soon: "),
        (("--since", "1h"), "has a date and a time"),
        (("--rank", "1", "--node", "n1"), "--node and --rank exclude each other"),
        (("--monitor", "-n", "3"), "--monitor is about nodes"),
    ],
)
def test_options_that_cannot_be_used_are_named(run_dir: Path, words: tuple[str, ...], message: str) -> None:
    answered = within("logs", *words)
    assert (answered.code, answered.out) == (5, "")
    assert message in answered.err
