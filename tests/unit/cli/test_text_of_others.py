"""No verb prints what a terminal would obey, whoever wrote the text: Slurm, a run folder, a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_json_output
from commandline import within
from hostile_text import EVIL, OBEYED
from sample_cluster import SampleCluster, accounted
from terminal import on_terminal
from verb_cases import CASES, Case

_LEFT = ("completion", "sandbox", "cloud", "container", "fabric", "sites schema", "scale", "fetch", "jupyter")
"""Verbs that read neither Slurm's answers nor run folders of jobs, and those that run for seconds."""
MORE = tuple(
    Case(line.replace(" ", "_"), tuple(line.split()), line)
    for line in ("ps -a", "wait 44 45 --timeout 0", "why 46", "show 46", "cancel 46", "hold 46", "update 46 time=2h",
                 "diff 43_0 43_1", "report jobs -a", "logs 44 --tail 3", "monitor 44")
)  # fmt: skip
"""Of jobs that wait, that run, that were submitted by other means."""
REFUSED = 5
"""A manifest that no job of hpcjobs can have is not used."""
JSON = [name for name in test_json_output.CASES if not name.startswith((*_LEFT, "report scaling"))]
_POISONED = {
    "squeue": ("j", "r", "P", "N", "a", "q"),
    "sacct": ("Reason", "Account", "QOS", "NodeList", "Partition", "WorkDir"),
}
"""Columns of Slurm's tables that somebody else fills; by sacct's names of jobs this cluster tells which are ours."""
VERBS = [case for case in (*CASES, *MORE) if not case.verb.startswith(_LEFT)]


def poison(value: Any, key: str = "") -> Any:
    """Texts that people read with `EVIL` in them; what decides the way through stays."""
    if isinstance(value, dict):
        return {name: poison(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [poison(one, key) for one in value]
    texts = ("comment", "user", "host", "commit", "reason", "hpcjobs", "command_line", "message", "nodes", "account")
    return value + EVIL if isinstance(value, str) and key in texts else value


def poison_tables(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """Write `EVIL` and a line that passes for one of ours into the columns of squeue and sacct, now and later."""
    plain = cluster.table

    def table(command: str, rows: list[dict[str, str]]) -> None:
        ending = f"{EVIL[:-1]}@NL@hpcjobs: done"
        poisoned = [{**row, **{key: row.get(key, "") + ending for key in _POISONED[command]}} for row in rows]
        plain(command, poisoned)
        script = (cluster.commands / command).read_text()
        cluster.command(command, script.replace("print out", r'gsub(/@NL@/, "\n", out); print out'))

    patch.setattr(cluster, "table", table)
    for command in _POISONED:
        header, *lines = (cluster.commands / f"{command}.table").read_text().splitlines()
        cluster.table(command, [dict(zip(header.split("|"), line.split("|"), strict=True)) for line in lines])


@pytest.fixture
def hostile(cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch) -> SampleCluster:
    """The sample cluster, whose Slurm adds `EVIL` to what it prints and whose run folders hold it."""
    poison_tables(cluster, monkeypatch)
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
    out = "" if case.verb.startswith("logs") else answer.out  # exact where no terminal reads it
    assert OBEYED.findall(out + answer.err) == [], answer
    assert answer.code != 70, answer
    forged = [line for line in (out + answer.err).splitlines() if line == "hpcjobs: done"]
    assert forged == [], answer


@pytest.mark.parametrize("name", JSON)
def test_json_of_hostile_answers_is_valid_and_printable(
    hostile: SampleCluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    line, prepare = test_json_output.CASES[name]
    prepare(hostile, monkeypatch)
    (hostile.commands / "next").write_text("47")
    answer = within(*line.split())
    assert OBEYED.findall(answer.out + answer.err) == [], answer
    assert answer.code != 70, answer
    if answer.code != REFUSED:
        json.loads(answer.out)


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


@pytest.mark.parametrize("verb", ["report jobs --csv -", "sweep results lr --csv -"])
def test_a_table_of_csv_is_exact_in_a_pipe_and_printable_on_a_terminal(cluster: SampleCluster, verb: str) -> None:
    cluster.sweep()
    name = EVIL[:-1]
    row = accounted("88", name, "COMPLETED", "0:0", begun=900, lasted=300, nodes="n1", n=1)
    cluster.account([row])
    for summary in cluster.here.glob("runs/sweep-lr/cells/*/summary.json"):
        summary.write_text(json.dumps({"schema": "hpcjobs.summary/1", "loss": 2.5, "label": name}))
    assert "y\x9b2Jz\u202eabc" in within(*verb.split()).out
    shown = on_terminal(*verb.split(), columns=80)
    assert OBEYED.findall(shown.out.replace("\r\n", "\n")) == [], shown
    assert "abc" in shown.out
