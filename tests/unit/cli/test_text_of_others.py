"""No verb prints what a terminal would obey, whoever wrote the text: Slurm, a run folder, a program."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commandline import within
from sample_cluster import SampleCluster
from verb_cases import CASES, Case

EVIL = "x\x1b]52;c;aGk=\x07\x1b[2Jy\x9b2Jz\u202eabc\u200f\x85\r"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_LEFT = ("completion", "sandbox", "cloud", "container", "fabric", "sites schema", "scale", "fetch", "jupyter")
"""Verbs that read neither Slurm's answers nor run folders of jobs, and those that run for seconds."""
VERBS = [case for case in CASES if not case.verb.startswith(_LEFT)]


def poison(value: Any, key: str = "") -> Any:
    """Texts that people read with `EVIL` in them; what decides the way through stays."""
    if isinstance(value, dict):
        return {name: poison(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [poison(one, key) for one in value]
    texts = ("comment", "user", "host", "commit", "reason", "hpcjobs", "command_line", "message", "nodes", "account")
    return value + EVIL if isinstance(value, str) and key in texts else value


@pytest.fixture
def hostile(cluster: SampleCluster) -> SampleCluster:
    """The sample cluster, whose Slurm adds `EVIL` to what it prints and whose run folders hold it."""
    for name in ("scontrol", "sinfo", "sprio", "sdiag", "sacctmgr"):
        if (command := cluster.commands / name).exists():
            command.rename(cluster.commands / f"plain-{name}")
            cluster.command(name, f'"${{0%/*}}/plain-{name}" "$@" | sed "s/$/{EVIL[:-1]}/"')
    for path in cluster.here.rglob("*.json"):
        if "runs" in path.parts:
            path.write_text(json.dumps(poison(json.loads(path.read_text()))))
    for log in cluster.here.rglob("*.out"):
        log.write_text(log.read_text() + EVIL + "\n")
    return cluster


@pytest.mark.parametrize("case", VERBS, ids=lambda case: case.name)
def test_no_verb_prints_what_a_terminal_obeys(
    hostile: SampleCluster, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    case.prepare(hostile, monkeypatch)
    answer = within(*case.arguments)
    out = "" if case.verb == "logs" else answer.out  # exact where no terminal reads it
    assert OBEYED.findall(out + answer.err) == [], answer


@pytest.mark.parametrize("name", ["sbatch", "squeue", "sacct", "scontrol", "scancel"])
def test_the_refusal_of_a_command_is_printable(cluster: SampleCluster, name: str) -> None:
    (cluster.commands / "evil").write_text(EVIL)
    cluster.command(name, f"cat {cluster.commands}/evil >&2; exit 1")
    for arguments in (("ps",), ("submit", "train.py"), ("hold", "45"), ("cancel", "44"), ("why", "45")):
        answer = within(*arguments)
        assert OBEYED.findall(answer.out + answer.err) == [], answer


def test_json_is_exact_and_holds_nothing_that_a_terminal_obeys(cluster: SampleCluster) -> None:
    folder = cluster.run_dirs["41"]
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["job"]["argv"] = ["echo", EVIL]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    answer = within("show", "41", "--json")
    assert OBEYED.findall(answer.out) == []
    assert "x\\u001b]52;c;aGk=" in answer.out
    assert EVIL in answer.json["program"]
    assert OBEYED.findall(within("show", "41").out) == []


def test_a_log_is_exact_in_a_file(cluster: SampleCluster, tmp_path: Path) -> None:
    cluster.write_log("42", EVIL + "\n")
    assert EVIL.rstrip("\r") in within("logs", "42").out
