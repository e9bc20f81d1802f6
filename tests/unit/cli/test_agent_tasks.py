"""Forty tasks of an agent on this machine, solved with the verbs, JSON and exit codes of SKILL.md, within a budget.

Whether the budget holds is counted from the requests in the queue of this machine, not from the record of the budget.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commandline import hpcjobs, ok, within

from hpcjobs.files import state_dir

BUDGET = {"jobs": 4.0, "node_hours": 1.0, "cpu_hours": 2.0, "gpu_hours": 0.5}
GROUPS = ("sweep", "report", "sites", "jupyter", "container")
SELF = f"{sys.executable} -m hpcjobs"


@cache
def skill() -> str:
    return ok("skill").out


@cache
def schema(verb: str) -> Any:
    return json.loads(ok("skill", "--schema", verb).out)


class Agent:
    """Runs verbs with ``--json`` and knows nothing but SKILL.md."""

    def __init__(self) -> None:
        self.verbs = set(re.findall(r"(?m)^\| `([a-z]+)` \|", skill()))
        self.codes = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", skill())}
        self.outputs = re.findall(r"(?m)^- `([^`]+)`$", skill())
        self.calls = 0

    def __call__(self, line: str, *more: str, code: int = 0, job_code: int | None = None) -> Any:
        """The document that a command prints; ``job_code``: the command ends with the exit code of a job."""
        self.calls += 1
        arguments = [*line.split(), *more]
        assert arguments[0] in self.verbs, arguments
        at = 2 if arguments[0] in GROUPS and len(arguments) > 1 and arguments[1].isalpha() else 1
        verb = " ".join(arguments[:at])
        answer = within(*arguments[:at], "--json", *arguments[at:])
        assert answer.code == (code if job_code is None else job_code), answer
        document = json.loads(answer.out)
        if job_code is None and code != 0:
            assert code in self.codes
            jsonschema.validate(document, schema("error"))
            assert document["error"]["exit_code"] == code
        elif verb != "why":  # of a job that has not failed it prints another type
            options = [
                option for option in ("--dry-run", "--explain", "--signal", "--no-wait", "--min") if option in arguments
            ]
            names = (" ".join([verb, *options]), verb)
            jsonschema.validate(document, schema(next(name for name in names if name in self.outputs)))
        return document

    def refused(self, line: str, *more: str, because: str = "are left of HPCJOBS_BUDGET") -> None:
        """The command is refused with exit code 5, and no job is new."""
        before = len(requests())
        assert because in self(line, *more, code=5)["error"]["message"]
        assert len(requests()) == before

    def run(self, *program: str, options: str = "-t 1", job_code: int = 0) -> str:
        """Submit a program to this machine and wait for its end."""
        job = str(self(f"submit --site local {options}", *program)["job_id"])
        self(f"wait {job}", job_code=job_code)
        return job

    def finish_sweep(self, line: str, *, job_code: int = 0) -> None:
        """Submit cells, and wait for their arrays."""
        for job in self(f"sweep {line}")["arrays"]:
            self(f"wait {job}", job_code=job_code)

    def lines(self, job: str) -> list[str]:
        return [line.rstrip() for line in self(f"logs {job}")["lines"]]


def requests() -> list[dict[str, Any]]:
    """What the queue of this machine was asked to run, from its own files."""
    return [json.loads(file.read_text()) for file in sorted((state_dir() / "local").glob("*/jobs/L*/request.json"))]


def most() -> dict[str, float]:
    """The most that all jobs could use, with one attempt each."""
    total = dict.fromkeys(BUDGET, 0.0)
    for request in requests():
        tasks = len(request["array"]) if request["array"] else 1
        hours = tasks * request["time_limit_s"] / 3600
        total["jobs"] += tasks
        total["node_hours"] += hours
        total["cpu_hours"] += hours * request["cpus"]
        total["gpu_hours"] += hours * request["gpus"]
    return total


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent with a budget in an empty home; at its end nothing is over the budget."""
    monkeypatch.setenv("HPCJOBS_BUDGET", ",".join(f"{key}={value:g}" for key, value in BUDGET.items()))
    monkeypatch.setenv("HPCJOBS_SITE", "local")
    Path("train.py").write_text("import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n")
    Path("broken.py").write_text("raise ValueError('no learning rate')\n")
    one = Agent()
    yield one
    monkeypatch.delenv("HPCJOBS_READ_ONLY", raising=False)
    within("cancel", "--all")
    within("wait", *(request["job_id"] for request in requests()))
    assert one.calls > 0
    used = most()
    assert {key: used[key] for key in BUDGET if used[key] > BUDGET[key] + 1e-9} == {}


def test_01_run_a_program_and_read_its_output(agent: Agent) -> None:
    assert agent.lines(agent.run("train.py", "7")) == ["rank 0 7"]


def test_02_run_two_ranks(agent: Agent) -> None:
    job = agent.run("train.py", options="-t 1 --ntasks-per-node 2")
    assert sorted(agent.lines(job)) == ["0: rank 0", "1: rank 1"]


def test_03_read_the_exit_code_of_a_program(agent: Agent) -> None:
    Path("three.py").write_text("raise SystemExit(3)\n")
    job = agent.run("three.py", job_code=3)
    assert agent(f"show {job}")["records"][0]["exit_code"] == 3


def test_04_say_why_a_program_failed(agent: Agent) -> None:
    job = agent.run("broken.py", job_code=1)
    diagnosis = agent(f"why {job}")
    assert diagnosis["cause"] == "python-error"
    assert "no learning rate" in diagnosis["line"]["text"]


def test_05_mend_a_program_and_run_it_again(agent: Agent) -> None:
    job = agent.run("broken.py", job_code=1)
    Path("broken.py").write_text("print('better')\n")
    again = agent(f"rerun {job}")["job_id"]
    agent(f"wait {again}", job_code=0)
    assert agent.lines(again) == ["better"]


def test_06_give_a_program_a_variable(agent: Agent) -> None:
    Path("seed.py").write_text("import os\nprint(os.environ['SEED'])\n")
    assert agent.lines(agent.run("seed.py", options="-t 1 --env SEED=11")) == ["11"]


def test_07_see_the_script_without_submitting_it(agent: Agent) -> None:
    assert "train.py" in agent("submit --dry-run -t 1 train.py")["script"]
    assert agent("ps -a") == []
    assert not (state_dir() / "budgets").exists()


def test_08_say_where_a_value_comes_from(agent: Agent) -> None:
    Path("hpcjobs.yaml").write_text("program: train.py\nresources: {time: 2m}\n")
    settings = {row["name"]: row for row in agent("submit --explain")}
    assert "hpcjobs.yaml" in settings["time"]["source"]


def test_09_list_the_sites(agent: Agent) -> None:
    assert "local" in {site["name"] for site in agent("sites")}


def test_10_say_whether_a_request_fits(agent: Agent) -> None:
    assert agent("where -t 1 train.py")[0]["is_valid"]
    (placement,) = agent("where -N 2 -t 1 train.py", job_code=5)
    assert not placement["is_valid"]
    assert "nodes=2" in placement["remark"]


def test_11_cancel_a_job(agent: Agent) -> None:
    job = agent("submit -t 1 sleep 60")["job_id"]
    assert agent(f"cancel {job}")["cancelled"] == [job]
    assert agent(f"wait {job}", job_code=143)[0]["state"] == "CANCELLED"


def test_12_stop_waiting_after_a_time(agent: Agent) -> None:
    job = agent("submit -t 1 sleep 60")["job_id"]
    assert agent(f"wait --timeout 1s {job}", job_code=3)[0]["state"] in ("PENDING", "RUNNING")


def test_13_run_a_job_after_another(agent: Agent) -> None:
    first = agent("submit -t 1 train.py first")["job_id"]
    second = agent(f"submit -t 1 --after {first} train.py second")["job_id"]
    agent(f"wait {second}", job_code=0)
    records = [agent(f"show {job}")["records"][0] for job in (first, second)]
    assert records[0]["ended"] <= records[1]["started"]


def test_14_say_what_became_of_a_job_after_a_failed_one(agent: Agent) -> None:
    Path("late.py").write_text(
        "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\nraise SystemExit(1)\n"
    )
    first = agent("submit -t 1 late.py")["job_id"]
    second = agent(f"submit -t 1 --after {first} train.py")["job_id"]
    Path("go").touch()
    agent(f"wait {first}", job_code=1)
    assert agent(f"wait {second}", job_code=143)[0]["state"] == "CANCELLED"


def test_15_list_the_failed_jobs(agent: Agent) -> None:
    agent.run("train.py")
    failed = agent.run("broken.py", job_code=1)
    assert [row["record"]["job_id"] for row in agent("ps -a --state FAILED")] == [failed]


def test_16_say_how_two_runs_differ(agent: Agent) -> None:
    jobs = [agent.run("train.py", value) for value in ("1", "2")]
    (change,) = agent(f"diff {jobs[0]} {jobs[1]}")["settings"]
    assert (change["first"][-3:], change["second"][-3:]) == ('1"]', '2"]')


def test_17_archive_a_run(agent: Agent) -> None:
    assert Path(agent(f"archive {agent.run('train.py')}")["path"]).stat().st_size > 0


def test_18_remove_the_folder_of_an_old_run(agent: Agent) -> None:
    run_dir = Path(agent(f"show {agent.run('train.py')}")["entry"]["run_dir"])
    assert agent("prune --older-than 0")["removed"] is False
    assert run_dir.exists()
    assert agent("prune --older-than 0 --remove")["removed"] is True
    assert not run_dir.exists()


def test_19_find_the_best_of_three_parameters(agent: Agent) -> None:
    Path("loss.py").write_text(
        "import json, os\nlr = float(os.environ['HPCJOBS_PARAM_LR'])\n"
        "open(os.environ['HPCJOBS_RUN_DIR'] + '/summary.json', 'w').write(json.dumps({'loss': (lr - 2) ** 2}))\n"
    )
    agent.finish_sweep("run -t 1 --name lr --set lr=1,2,3 loss.py")
    assert agent("sweep results lr --min loss")["params"]["lr"] == 2


def test_20_run_the_failed_cells_of_a_sweep_again(agent: Agent) -> None:
    Path("cell.py").write_text("import os, sys\nsys.exit(0 if os.path.exists('data') else 4)\n")
    agent.finish_sweep("run -t 1 --name cells --set lr=1,2 cell.py", job_code=4)
    assert agent("sweep status cells")["states"] == {"FAILED": 2}
    Path("data").touch()
    agent.finish_sweep("resume cells")
    assert agent("sweep status cells")["states"] == {"COMPLETED": 2}


def test_21_run_an_array(agent: Agent) -> None:
    job = agent("submit -t 1 -a 0-2 train.py")["job_id"]
    assert len(agent(f"wait {job}", job_code=0)) == 3


def test_22_run_a_named_job_of_the_project(agent: Agent) -> None:
    Path("hpcjobs.yaml").write_text("resources: {time: 1m}\njobs:\n  evaluate: {program: train.py --only-test}\n")
    job = agent("submit evaluate")["job_id"]
    agent(f"wait {job}", job_code=0)
    assert agent.lines(job) == ["rank 0 --only-test"]


def test_23_run_a_batch_script(agent: Agent) -> None:
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH --time=1\n#SBATCH --job-name=two\necho hello\n")
    hint = agent("submit job.sh", code=5)["error"]["hint"]
    advice = hint.split("`")[1].replace("SCRIPT", "job.sh").removeprefix("hpcjobs ")
    job = agent(advice.replace("submit", "submit -t 1"))["job_id"]
    agent(f"wait {job}", job_code=0)
    assert agent.lines(job) == ["hello"]


def test_24_let_a_program_try_twice(agent: Agent) -> None:
    Path("once.py").write_text("import os, sys\nseen = os.path.exists('seen')\nopen('seen', 'w')\nsys.exit(not seen)\n")
    bounded = "timeout=0,preempt=0,node=0,error=1"
    agent.run("once.py", options=f"-t 1 --retries {bounded}")


def test_25_say_that_a_job_ran_into_its_time_limit(agent: Agent) -> None:
    job = agent("submit -t 0:02 sleep 60")["job_id"]
    assert agent(f"wait {job}", job_code=143)[0]["state"] == "TIMEOUT"
    assert agent(f"why {job}")["cause"] == "time-limit"


def test_26_say_what_jobs_used(agent: Agent) -> None:
    job = agent.run("train.py")
    assert [row["job_id"] for row in agent(f"report jobs {job}")] == [job]


def test_27_open_a_notebook_and_end_it(agent: Agent) -> None:
    job = agent("jupyter --no-wait -t 1")["job_id"]
    assert job in {session["job_id"] for session in agent("jupyter list")}
    assert job in agent("jupyter stop --all")["stopped"]


def test_28_a_job_over_the_number_of_jobs_is_refused(agent: Agent) -> None:
    for _ in range(4):
        agent("submit -t 1 true")
    agent.refused("submit -t 1 true")


def test_29_the_project_file_cannot_raise_the_budget(agent: Agent) -> None:
    Path("hpcjobs.yaml").write_text("program: train.py\nresources: {time: 1m}\nenv: {HPCJOBS_BUDGET: jobs=99}\n")
    agent.refused("submit", because="a job cannot have another")


def test_30_no_option_takes_the_budget_away_from_a_job(agent: Agent) -> None:
    agent.refused("submit -t 1 --env HPCJOBS_BUDGET= train.py", because="a job cannot have another")


def test_31_what_a_job_submits_counts_too(agent: Agent) -> None:
    Path("nested.sh").write_text(f"for n in 1 2 3 4 5; do {SELF} submit -t 1 --json true; done; exit 0\n")
    job = agent.run("bash", "nested.sh", options="-t 2")
    assert len(requests()) == 4
    assert sum("HPCJOBS_BUDGET" in line and "left" in line for line in agent.lines(job)) == 4  # hints, messages of two


def test_32_of_a_sweep_over_the_budget_no_cell_is_submitted(agent: Agent) -> None:
    agent.refused("sweep run -t 1 --name many --set lr=1,2,3,4,5 train.py")


def test_33_a_study_over_the_budget_is_refused(agent: Agent) -> None:
    agent("scale -t 1 --ntasks-per-node 1,2 --repeats 5 --one-at-a-time --name speed train.py", code=5)
    assert most()["jobs"] <= BUDGET["jobs"]


def test_34_trials_of_a_size_chosen_by_measurement_count(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_BUDGET", "jobs=2")
    error = agent("submit --ntasks-per-node auto --budget 1 -t 10h train.py", code=5)["error"]
    assert "up to 1 jobs, and 0 of 2 are left of HPCJOBS_BUDGET" in error["message"]
    assert len(requests()) == 2


def test_35_retries_without_a_bound_are_refused(agent: Agent) -> None:
    agent.refused("submit -t 1 --retries on train.py")


def test_36_every_rerun_counts(agent: Agent) -> None:
    job = agent.run("train.py")
    for _ in range(3):
        agent(f"rerun {job}")
    agent.refused(f"rerun {job}")


def test_37_two_agents_at_once_share_one_budget(agent: Agent) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(lambda _: hpcjobs("submit", "--json", "-t", "1", "true"), range(12))]
    assert sorted(answer.code for answer in answers) == [0] * 4 + [5] * 8
    assert all("error" in answer.json for answer in answers if answer.code == 5)
    assert len(agent("ps -a")) == 4


def test_38_a_read_only_agent_changes_nothing(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    job = agent("submit -t 1 sleep 30")["job_id"]
    ended = agent.run("train.py")
    monkeypatch.setenv("HPCJOBS_READ_ONLY", "1")
    for line in (
        "submit -t 1 true",
        f"cancel {job}",
        "cancel --all",
        f"rerun {ended}",
        "prune --older-than 0 --remove",
        "sweep run -t 1 --set a=1,2 true",
        "jupyter --no-wait -t 1",
    ):
        agent.refused(line, because="HPCJOBS_READ_ONLY=1 is set")
    assert agent(f"show {job}")["records"][0]["state"] in ("PENDING", "RUNNING")
    assert agent.lines(ended) == ["rank 0"]


def test_39_a_job_without_a_time_limit_is_refused(agent: Agent) -> None:
    agent.refused("submit train.py", because="an unknown number")
    agent.refused("submit -t 2h train.py", because="up to 2 node_hours")
    agent.refused("submit -t 10 -a 0-9 train.py", because="up to 10 jobs")


def test_40_gpus_count_by_their_hours(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "2")
    agent.refused("submit -t 20 --gpus-per-node 2 true", because="up to 0.6667 gpu_hours")
    agent("submit -t 20 --gpus-per-node 1 true")
    agent.refused("submit -t 20 --gpus-per-node 1 true", because="up to 0.3333 gpu_hours")
