"""HPCJOBS_READ_ONLY and HPCJOBS_BUDGET hold for every verb, whatever the options."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import add
from pathlib import Path

import pytest
from commandline import hpcjobs, ok, within
from sample_cluster import SampleCluster

import hpcjobs as hpcjobs_package
from hpcjobs.errors import RequestError
from hpcjobs.files import state_dir

PACKAGE = Path(hpcjobs_package.__file__).parent

CHANGES = (
    ("submit", "train.py"),
    ("submit", "-a", "0-3", "train.py"),
    ("rerun", "41"),
    ("cancel", "44"),
    ("cancel", "--all"),
    ("hold", "45"),
    ("release", "45"),
    ("requeue", "44"),
    ("update", "44", "time=1:00:00"),
    ("cancel", "--signal", "USR1", "44"),
    ("scale", "-N", "1,2", "--name", "speed", "train.py"),
    ("sweep", "run", "--set", "lr=1,2", "--name", "lr", "train.py"),
    ("fabric",),
    ("alloc", "-N", "1", "true"),
    ("exec", "44", "--", "true"),
    ("drill", "kill-rank", "train.py"),
    ("prune", "--older-than", "0", "--remove"),
)


@pytest.fixture
def record(cluster: SampleCluster) -> Path:
    """A file that each command that changes something would write to."""
    file = cluster.commands / "record"
    for name in ("sbatch", "scancel", "salloc"):
        cluster.command(name, f'echo {name} "$@" >>{file}; echo 47')
    shown = (cluster.commands / "scontrol").read_text().partition("\n")[2]
    cluster.command("scontrol", f'[ "$1" = show ] || echo scontrol "$@" >>{file}\n{shown}')
    return file


@pytest.mark.parametrize("verb", CHANGES, ids=" ".join)
def test_nothing_is_changed_in_a_read_only_environment(
    record: Path, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {*Path("runs").iterdir()}
    monkeypatch.setenv("HPCJOBS_READ_ONLY", "1")
    answer = within(*verb)
    assert answer.code == 5, answer
    assert "refused, because HPCJOBS_READ_ONLY=1 is set" in answer.err
    assert not record.exists(), record.read_text()
    assert {
        path for path in {*Path("runs").iterdir()} - before if not path.name.startswith(("sweep", "study"))
    } == set()
    for reading in (("ps",), ("show", "41"), ("why", "42"), ("submit", "--dry-run", "train.py")):
        ok(*reading)


@pytest.mark.parametrize(
    ("verb", "budget", "message"),
    [
        (("submit", "-t", "2:00:00", "train.py"), "node_hours=1", "job train: up to 2 node_hours, and 1 of 1 are left"),
        (("submit", "-a", "0-3", "-t", "10", "train.py"), "jobs=3", "up to 4 jobs, and 3 of 3 are left"),
        (("submit", "-N", "2", "--gpus-per-node", "4", "-t", "60", "train.py"), "gpu_hours=7.5", "up to 8 gpu_hours"),
        (("submit", "-N", "2", "-c", "8", "-t", "60", "train.py"), "cpu_hours=15", "up to 16 cpu_hours"),
        (("submit", "--retries", "on", "-t", "1", "train.py"), "node_hours=99", "retries ∞"),
        (("submit", "-t", "60", "--retries", "timeout=1,preempt=0,node=2", "train.py"), "node_hours=3", "up to 4 node"),
        (("submit", "--exclusive", "-t", "1", "train.py"), "cpu_hours=99", "--exclusive"),
        (("rerun", "41"), "jobs=0", "up to 1 jobs, and 0 of 0 are left"),
        (("sweep", "run", "--set", "lr=1,2,3", "--name", "lr", "train.py"), "jobs=2", "up to 3 jobs"),
        (("scale", "-N", "1", "--repeats", "3", "--name", "speed", "train.py"), "jobs=2", "up to 3 jobs"),
        (("fabric",), "jobs=0", "up to 1 jobs"),
        (("requeue", "44"), "jobs=0", "up to 1 jobs, and 0 of 0 are left"),
        (("update", "44", "time=+10:00:00"), "node_hours=1", "up to "),
        (("update", "44", "nodes=9"), "node_hours=1", "up to "),
        (("update", "44", "NumCPUs=99"), "cpu_hours=99", "an unknown number"),
        (("alloc", "-N", "1", "true"), "jobs=0", "up to 1 jobs"),
    ],
)
def test_what_may_exceed_the_budget_is_refused(
    record: Path, verb: tuple[str, ...], budget: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", budget)
    answer = within(*verb)
    assert answer.code == 5, answer
    assert message in answer.err
    assert not record.exists()


@pytest.mark.parametrize("text", ["gpu_hours", "gpus=3", "jobs=-1", "jobs=nan", "jobs=1,jobs=2", "jobs=1,,"])
def test_a_budget_that_cannot_be_read_stops_every_submission(
    record: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", text)
    answer = within("submit", "train.py")
    assert answer.code == 4, answer
    assert "HPCJOBS_BUDGET=gpu_hours=10,jobs=5" in answer.err
    assert not record.exists()


def test_a_budget_is_counted_over_commands_and_not_for_what_was_refused(
    cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=3,node_hours=10")
    ok("submit", "-t", "2:00:00", "train.py")
    sbatch = (cluster.commands / "sbatch").read_text()
    cluster.command("sbatch", "echo 'sbatch: error: no' >&2; exit 1")
    assert within("submit", "-t", "2:00:00", "train.py").code != 0
    cluster.command("sbatch", sbatch)
    ok("submit", "-N", "4", "-t", "2:00:00", "train.py")
    answer = within("submit", "-t", "1", "train.py")
    assert "up to 0.01667 node_hours, and 0 of 10 are left" in answer.err
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=3,node_hours=10,name=other")
    ok("submit", "-t", "2:00:00", "train.py")
    (ledger, _) = sorted((state_dir() / "budgets").iterdir(), key=lambda path: -path.stat().st_size)
    lines = [json.loads(line)["amounts"]["node_hours"] for line in ledger.read_text().splitlines()]
    assert lines == [2, 2, -2, 8]
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=3,node_hours=10")
    ledger.write_text("x\n")
    assert "cannot be used" in within("submit", "-t", "1", "train.py").err


def test_forty_submissions_at_once_stay_within_the_budget(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "HPCJOBS_BUDGET": "jobs=7", "XDG_STATE_HOME": str(tmp_path / "state")}
    env |= {"HPCJOBS_SANDBOX_ROOT": str(tmp_path / "sandbox")}
    with ThreadPoolExecutor(8) as pool:
        submit = ("submit", "--site", "local", "-t", "1", "true")
        answers = [*pool.map(lambda _: hpcjobs(*submit, cwd=tmp_path, env=env), range(40))]
    assert sorted(answer.code for answer in answers) == [0] * 7 + [5] * 33
    jobs = [row["record"]["job_id"] for row in hpcjobs("ps", "-a", "--json", cwd=tmp_path, env=env).json]
    assert len(jobs) == 7
    assert hpcjobs("wait", *jobs, cwd=tmp_path, env=env).code == 0


def test_settings_that_use_no_more_hours_are_changed_within_a_budget(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=0,node_hours=0")
    ok("update", "44", "comment=later", "time=1")
    assert "TimeLimit=" in record.read_text()


@pytest.mark.usefixtures("record")
def test_a_change_of_one_task_names_the_task() -> None:
    assert ok("update", "43_4", "time=20m").out == "job 43_4: TimeLimit=00:20:00\n"
    assert ok("update", "43_4", "time=20m", "--json").json["job_id"] == "43_4"


def test_a_job_gets_the_budget_of_its_submitter_and_no_other(
    cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("hpcjobs.yaml").write_text("program: train.py\nenv: {HPCJOBS_BUDGET: jobs=99}\n")
    assert "export HPCJOBS_BUDGET=jobs=99" in ok("submit", "--dry-run").out
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=2,gpu_hours=1")
    answer = within("submit", "--dry-run")
    assert answer.code == 5
    assert "env HPCJOBS_BUDGET=jobs=99 (" in answer.err
    assert "hpcjobs.yaml" in answer.err
    assert "a job cannot have another" in answer.err
    assert within("submit", "--env", "HPCJOBS_BUDGET=", "train.py").code == 5
    Path("alone.sh").write_text("#!/bin/bash\n#SBATCH --export=NONE\ntrue\n")
    for program in ("train.py", "alone.sh"):
        assert "export HPCJOBS_BUDGET=jobs=2,gpu_hours=1\n" in ok("submit", "--dry-run", program).out, program
    assert "export HPCJOBS_BUDGET=jobs=2,gpu_hours=1\n" in ok("rerun", "--dry-run", "41").out


CHANGING = ("submit", "cancel", "control", "update", "signal", "allocate")
"""Functions of `hpcjobs.slurm_commands` that build a command which changes jobs."""
COUNTING = ("guards.count", "count_against_budget")
CHECKED = {
    "scheduler/slurm/client.py": {"submit", "cancel", "_control", "update", "signal"},
    "scheduler/local/client.py": {"submit", "cancel"},
    "run/interactive.py": {"allocate", "attach"},
    "sweeps/executor.py": {"_internal_process_submissions"},
    "run/archive.py": {"remove"},
    "cloud/lifecycle.py": {"up", "down"},
}
"""Functions that change jobs, records or machines: each refuses to in a read-only environment."""
COUNTED = {
    "scheduler.submit": {"run/submit.py:hand_over"},
    "scheduler.requeue": {"run/control.py:control"},
    "scheduler.update": {"run/control.py:update"},
}
"""Verbs of a scheduler that use a budget -> the one function that calls each, inside ``guards.count``."""


def calls() -> Iterator[tuple[str, str, str]]:
    """Each attribute of a name in the package: file, function, ``name.attribute``."""

    def walk(node: ast.AST, file: str, function: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                yield file, inside, f"{child.value.id}.{child.attr}"
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name):
                yield file, inside, child.func.id
            yield from walk(child, file, inside)

    for path in PACKAGE.rglob("*.py"):
        yield from walk(ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(PACKAGE)), "")


def test_each_command_that_changes_jobs_is_built_behind_the_guards() -> None:
    """On the compute node alone (``node/``) a job changes itself: its attempts were counted when it was submitted."""
    used = list(calls())
    changing = {f"slurm_commands.{name}" for name in CHANGING}
    builders = {(file, function) for file, function, name in used if name in changing}
    builders = {(file, function) for file, function in builders if not file.startswith("node/")}
    checked = {(file, function) for file, function, name in used if name.endswith("refuse_change")}
    assert checked == {(file, function) for file, functions in CHECKED.items() for function in functions}
    assert builders - checked == {("job/plan.py", "_command")}  # a plan is a value: nothing is run by it
    for verb, functions in COUNTED.items():
        callers = {f"{file}:{function}" for file, function, name in used if name == verb}
        assert {caller for caller in callers if not caller.endswith(":__init__")} == functions, verb  # views forward
    counted = {f"{file}:{function}" for file, function, name in used if name in COUNTING}
    assert counted >= set().union(*COUNTED.values()) | {"run/interactive.py:allocate"}


def test_an_executor_of_submitit_submits_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=2,node_hours=0.2")
    executor = hpcjobs_package.executor(site="local", time="2m")
    with pytest.raises(RequestError, match="up to 3 jobs, and 2 of 2 are left"):
        executor.map_array(add, [1, 2, 3], [1, 2, 3])
    assert [job.result() for job in executor.map_array(add, [1, 2], [1, 2])] == [2, 4]
    with pytest.raises(RequestError, match="up to 1 jobs, and 0 of 2 are left"):
        executor.submit(add, 1, 2)
    monkeypatch.setenv("HPCJOBS_BUDGET", "node_hours=1")
    executor.update_parameters(timeout_min=600)
    with pytest.raises(RequestError, match="update_parameters was called"):
        executor.submit(add, 1, 2)
    monkeypatch.setenv("HPCJOBS_READ_ONLY", "1")
    with pytest.raises(RequestError, match="HPCJOBS_READ_ONLY=1 is set"):
        hpcjobs_package.executor(site="local", time="2m").submit(add, 1, 2)
