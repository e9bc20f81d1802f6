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
    ("monitor", "44"),
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


SCRIPTS = (
    # Options of a batch script, and what it may use in one hour: nodes, CPUs, GPUs.
    ("-n 32", (32, 32, 0)),
    ("-n 4 --ntasks-per-node=1", (4, 4, 0)),
    ("-n 4 -N 1 --ntasks-per-node=1", (4, 4, 0)),
    ("-N 2 --ntasks-per-node=8 -c 2", (2, 32, 0)),
    ("-N 1-3", (3, 3, 0)),
    ("-w node[01-04]", (4, 4, 0)),
    ("-N 1 -w node[01-04]", (4, 4, 0)),
    ("-n 16 -c 8", (16, 128, 0)),
    ("-N 1 -n 16 -c 8", (1, 128, 0)),
    ("-G 8 --cpus-per-gpu=16", (8, 128, 8)),
    ("-n 4 --gpus-per-task=2", (4, 4, 8)),
    ("-G 4 --ntasks-per-gpu=2", (8, 8, 4)),
    ("-N 2 --gres=gpu:4", (2, 2, 8)),
)


@pytest.mark.parametrize(("options", "most"), SCRIPTS, ids=[options for options, _ in SCRIPTS])
def test_a_batch_script_counts_with_the_most_that_slurm_may_give_it(
    record: Path, options: str, most: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(f"#SBATCH {option}\n" for option in ("-t 60", options))
    Path("a.sh").write_text(f"#!/bin/bash\n{lines}true\n")
    for key, hours in zip(("node_hours", "cpu_hours", "gpu_hours"), most, strict=True):
        monkeypatch.setenv("HPCJOBS_BUDGET", f"{key}={hours}")
        ok("submit", "a.sh")
        if hours:
            monkeypatch.setenv("HPCJOBS_BUDGET", f"{key}={hours - 0.5}")
            answer = within("submit", "a.sh")
            assert f"up to {hours} {key}" in answer.err, answer


@pytest.mark.parametrize(
    ("verb", "variable"),
    [
        (("submit", "--sbatch", "gpus-per-socket=4", "-t", "1", "train.py"), ""),
        (("submit", "--sbatch", "tres-per-task=gres/gpu=8", "-t", "1", "train.py"), ""),
        (("submit", "--sbatch", "mincp=8", "-t", "1", "train.py"), ""),
        (("submit", "--sbatch", "unheard-of=8", "-t", "1", "train.py"), ""),
        (("submit", "--core-spec", "1", "-t", "1", "train.py"), ""),
        (("submit", "--constraint", "[a*2&b*2]", "-t", "1", "train.py"), ""),
        (("submit", "-t", "1", "train.py"), "SBATCH_EXCLUSIVE"),
        (("submit", "-t", "1", "train.py"), "SBATCH_ARRAY_INX"),
        (("submit", "-t", "1", "mincpus.sh"), ""),
        (("alloc", "--sbatch", "mincpus=8", "-t", "1", "true"), ""),
        (("alloc", "-t", "1", "true"), "SALLOC_THREAD_SPEC"),
        (("update", "44", "CoreSpec=1"), ""),
        (("update", "44", "nodelist=node[01-04]"), ""),
    ],
    ids=str,
)
def test_what_a_budget_does_not_count_is_refused_where_hours_are_limited(
    record: Path, verb: tuple[str, ...], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mincpus.sh").write_text("#!/bin/bash\n#SBATCH --mincpus=8\ntrue\n")
    if variable:
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=9,node_hours=0.1")
    answer = within(*verb)
    assert answer.code == 5, answer
    assert "node_hours" in answer.err
    assert not record.exists()
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=9")
    assert within(*verb).code != 5


def test_an_option_that_may_add_cpus_is_refused_under_a_budget_of_cpus_alone(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb = ("submit", "--hint", "nomultithread", "-t", "1", "train.py")
    monkeypatch.setenv("HPCJOBS_BUDGET", "cpu_hours=99")
    answer = within(*verb)
    assert answer.code == 5, answer
    assert "an unknown number (hint=nomultithread" in answer.err
    monkeypatch.setenv("HPCJOBS_BUDGET", "gpu_hours=9,node_hours=9")
    ok(*verb)


def test_a_node_that_is_a_jobs_own_counts_as_a_whole(
    record: Path, cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Path("site_configs/mine.yaml")
    text = site.read_text()
    site.write_text(text + "directives: {gpus-per-node: null}\n")
    ok("sites", "trust", str(site))
    Path("a.sh").write_text("#!/bin/bash\n#SBATCH -t 60\ntrue\n")
    for job in (("--gpus-per-node", "0", "-c", "1", "-t", "60", "train.py"), ("a.sh",)):
        for budget, most in (("gpu_hours=3", "up to 4 gpu_hours"), ("cpu_hours=63", "up to 64 cpu_hours")):
            monkeypatch.setenv("HPCJOBS_BUDGET", budget)
            assert most in within("submit", *job).err
    site.write_text(text.replace("defaults: {", "defaults: {exclusive: true, "))
    ok("sites", "trust", str(site))
    monkeypatch.setenv("HPCJOBS_BUDGET", "gpu_hours=99")
    for job in (("-o", "exclusive=", "-t", "60", "train.py"), ("a.sh",)):
        assert "an unknown number" in within("submit", *job).err, job


def test_what_slurm_refuses_is_counted_back(cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=1")
    unrecognized = "unrecognized option '--nosuch=1'\nTry \"{0} --help\" for more information"
    for name in ("sbatch", "salloc"):
        cluster.command(name, f"cat >&2 <<'EOF'\n{name}: {unrecognized.format(name)}\nEOF\nexit 255")
    answer = within("submit", "--json", "--sbatch", "nosuch=1", "-t", "1", "train.py")
    assert answer.code == 7, answer
    assert answer.json["error"]["maybe_taken"] is False
    assert within("alloc", "--sbatch", "nosuch=1", "-t", "1", "true").code == 255
    cluster.command("salloc", "echo 'salloc: error: Job submit/allocate failed: Invalid qos' >&2; exit 1")
    assert within("alloc", "-t", "1", "true").code == 1
    begun = 'for a; do case $a in */interactive.bash) eval "$(grep "^: >" "$a")" ;; esac; done; exit 1'
    cluster.command("salloc", begun)
    assert within("alloc", "-t", "1", "bash", "-c", "exit 1").code == 1
    assert "0 of 1 are left" in within("alloc", "-t", "1", "true").err


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


def test_a_job_counts_where_its_submitter_counts_whatever_its_folders(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=1")
    where = state_dir() / "budgets"
    Path("alone.sh").write_text("#!/bin/bash\n#SBATCH --export=ALL,XDG_STATE_HOME=/elsewhere\ntrue\n")
    for job in (("--env", f"XDG_STATE_HOME={tmp_path}", "train.py"), ("alone.sh",)):
        assert f"export HPCJOBS_BUDGET_DIR={where}\n" in ok("submit", "--dry-run", *job).out
    answer = within("submit", "--env", f"HPCJOBS_BUDGET_DIR={tmp_path}", "train.py")
    assert answer.code == 5, answer
    ok("submit", "train.py")
    monkeypatch.setenv("HPCJOBS_BUDGET_DIR", str(where))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    answer = within("submit", "train.py")
    assert "up to 1 jobs, and 0 of 1 are left" in answer.err
    assert "--time" not in answer.err
    monkeypatch.setenv("HPCJOBS_BUDGET_DIR", str(tmp_path / "missing"))
    assert "no such folder here" in within("submit", "train.py").err


CHANGING = ("submit", "cancel", "control", "update", "signal", "allocate", "start_beside")
"""Functions of `hpcjobs.slurm_commands` that build a command which changes jobs."""
COUNTING = ("guards.count", "count_against_budget")
CHECKED = {
    "scheduler/slurm/client.py": {"submit", "cancel", "_control", "update", "signal"},
    "scheduler/local/client.py": {"submit", "cancel"},
    "run/steps.py": {"allocate", "attach", "start_foreign_sampler", "_start"},
    "sweeps/executor.py": {"_internal_process_submissions"},
    "run/archive.py": {"remove"},
    "run/control.py": {"_requeue"},  # before it removes notes
    "cloud/lifecycle.py": {"up", "down"},
}
"""Functions that change jobs, records or machines: each refuses to in a read-only environment."""
COUNTED = {
    "scheduler.submit": {"run/submit.py:hand_over"},
    "scheduler.requeue": {"run/control.py:_requeue"},
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
    builders = {(file, function) for file, function, name in used if name in changing | {"start_beside"}}
    builders = {(file, function) for file, function in builders if not file.startswith("node/")}
    checked = {(file, function) for file, function, name in used if name.endswith("refuse_change")}
    assert checked == {(file, function) for file, functions in CHECKED.items() for function in functions}
    # a plan and a step are values: nothing is run by them; the step is for a drill in a job that it has submitted
    assert builders - checked == {("job/plan.py", "_command"), ("scheduler/slurm/client.py", "step")}
    for verb, functions in COUNTED.items():
        callers = {f"{file}:{function}" for file, function, name in used if name == verb}
        assert {caller for caller in callers if not caller.endswith(":__init__")} == functions, verb  # views forward
    counted = {f"{file}:{function}" for file, function, name in used if name in COUNTING}
    assert counted >= set().union(*COUNTED.values()) | {"run/steps.py:allocate"}


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
