"""Who runs when: slots, order, dependencies, arrays."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from hpcjobs.errors import RequestError
from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.local.client import LocalScheduler

from .machines import Machine, make_plan, until


def test_a_second_job_waits_until_the_slots_of_the_first_are_free(machine: Machine) -> None:
    first = machine.held("first", cpus_per_task=2)
    machine.wait_for("first")
    second = machine.held("second")
    assert machine.queue() == {first: ("RUNNING", None), second: ("PENDING", "Resources")}
    machine.let_go("first")
    machine.wait_for("second")
    assert machine.state(first) == State.COMPLETED
    machine.let_go("second")
    assert machine.end_of(second).exit_code == 0


def test_jobs_run_side_by_side_as_far_as_the_cpus_go(machine: Machine) -> None:
    jobs = [machine.held(name) for name in ("a", "b", "c")]
    until(lambda: machine.runs("a") and machine.runs("b"))
    assert [state for state, _ in machine.queue().values()] == ["RUNNING", "RUNNING", "PENDING"]
    machine.let_go("b")
    machine.wait_for("c")
    assert list(machine.queue()) == [jobs[0], jobs[2]]
    machine.let_go("a")
    machine.let_go("c")


def test_a_small_job_does_not_overtake_a_large_one_that_waits(machine: Machine) -> None:
    machine.held("small")
    machine.wait_for("small")
    large = machine.held("large", ntasks_per_node=1, cpus_per_task=2)
    late = machine.held("late")
    assert machine.queue()[large] == ("PENDING", "Resources")
    assert machine.queue()[late] == ("PENDING", "Priority")
    machine.let_go("small")
    machine.wait_for("large")
    assert not machine.runs("late")
    machine.let_go("large")
    machine.wait_for("late")
    machine.let_go("late")


def test_a_job_of_more_tasks_than_cpus_shares_them_and_runs_alone(machine: Machine) -> None:
    machine.held("small")
    machine.wait_for("small")
    large = machine.submit("true", ntasks_per_node=3)
    assert machine.queue()[large] == ("PENDING", "Resources")
    machine.let_go("small")
    assert machine.end_of(large).state == State.COMPLETED


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({"cpus_per_task": 64}, r"cpus_per_task=64 \(flag\): this machine has 2"),
        ({"mem": "900T"}, r"mem=900T \(flag\): this machine has \d"),
        ({"mem_per_cpu": "450T", "cpus_per_task": 2}, r"mem_per_cpu=450T \(flag\) x 2: this machine has \d"),
    ],
)
def test_what_the_machine_does_not_have_is_refused_with_both_numbers(
    machine: Machine, settings: dict[str, object], options: str
) -> None:
    with pytest.raises(RequestError, match=options):
        machine.submit("true", **settings)
    assert machine.queue() == {}


def test_an_exclusive_job_has_all_cpus(machine: Machine) -> None:
    machine.held("alone", exclusive=True)
    other = machine.submit("true")
    machine.wait_for("alone")
    assert machine.queue()[other] == ("PENDING", "Resources")
    machine.let_go("alone")


def test_each_job_gets_gpus_nobody_else_has(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "3")
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "9")
    for name, gpus in (("a", 2), ("b", 1), ("none", 0)):
        machine.held(name, gpus_per_node=gpus, ntasks_per_node=1)
        machine.wait_for(name)
    waits = machine.held("waits", gpus_per_node=2, ntasks_per_node=1)
    seen = {name: (machine.here / f"{name}.runs").read_text().split()[1:] for name in ("a", "b", "none")}
    assert seen == {"a": ["0,1"], "b": ["2"], "none": []}
    assert machine.queue()[waits] == ("PENDING", "Resources")
    machine.let_go("a")
    machine.wait_for("waits")
    assert (machine.here / "waits.runs").read_text().split() == [waits, "0,1"]
    for name in ("b", "none", "waits"):
        machine.let_go(name)


def test_more_gpus_than_there_are_is_refused_with_both_numbers(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "3")
    with pytest.raises(RequestError, match=r"gpus_per_node=4.*has 3"):
        machine.submit("true", gpus_per_node=4, ntasks_per_node=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(RequestError, match=r"gpus_per_node=3.*has 1, chosen by CUDA_VISIBLE_DEVICES=2"):
        machine.submit("true", gpus_per_node=3, ntasks_per_node=1)
    assert machine.queue() == {}


@pytest.mark.parametrize("variable", ["HPCJOBS_LOCAL_CPUS", "HPCJOBS_LOCAL_GPUS", "HPCJOBS_GRACE_S"])
def test_a_variable_that_is_no_number_is_refused_by_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "two")
    with pytest.raises(RequestError, match=f"{variable}='two'"):
        machine.submit("true")


def test_what_is_recorded_of_a_job_is_on_the_disk_before_it_counts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(os.readlink(f"/proc/self/fd/{number}")), sync(number))
    )
    job = machine.submit("true")
    record, folder = (Path(name) for name in synced if job in name)
    assert record.name.startswith(".request.json")
    assert folder.name == job


def test_a_job_gets_none_but_the_gpus_that_its_user_chose(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "4")
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "9")
    seen = {}
    for name, chosen, gpus in (("a", "3,1", 1), ("b", "1,3", 1), ("none", "2", 0), ("uuid", "GPU-8932f937,7,0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        machine.held(name, gpus_per_node=gpus, ntasks_per_node=1)
        machine.wait_for(name)
        seen[name] = (machine.here / f"{name}.runs").read_text().split()[1:]
    assert seen == {"a": ["3"], "b": ["1"], "none": ["2"], "uuid": ["GPU-8932f937"]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    waits = machine.submit("true", gpus_per_node=1, ntasks_per_node=1)
    assert machine.queue()[waits] == ("PENDING", "Resources")
    for name in seen:
        machine.let_go(name)


def test_a_job_that_a_job_submits_may_have_any_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HPCJOBS_LOCAL_JOB", "/of/an/enclosing/job")
    for name, gpus in (("first", 2), ("none", 0)):
        machine.held(name, gpus_per_node=gpus, ntasks_per_node=1)
        machine.wait_for(name)
        machine.let_go(name)
    seen = {name: (machine.here / f"{name}.runs").read_text().split()[1:] for name in ("first", "none")}
    assert seen == {"first": ["0,1"], "none": []}


@pytest.mark.parametrize("settings", [{"begin": "now+1hour"}, {"hold": True}, {"gres": "nvme:1"}, {"licenses": "x"}])
def test_what_one_machine_cannot_honour_is_refused_by_name(machine: Machine, settings: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        machine.submit("true", **settings)


def test_options_that_describe_a_cluster_are_ignored(machine: Machine) -> None:
    job = machine.submit("true", mem="1M", account="physics", qos="long", constraint="avx512", mail_user="me")
    assert machine.end_of(job).state == State.COMPLETED


SUBMITTER = """
import sys
from hpcjobs.scheduler.local.client import LocalScheduler
sys.path.insert(0, sys.argv[1])
from local.machines import make_plan
for _ in range(5):
    print(LocalScheduler().submit(make_plan("bash", "-c", "echo $HPCJOBS_JOB_ID >> ran", name="many")).job_id)
"""


def test_concurrent_submits_from_threads_and_processes_lose_no_job(machine: Machine) -> None:
    tests = str(Path(__file__).parent.parent)
    others = [
        subprocess.Popen([sys.executable, "-c", SUBMITTER, tests], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    with ThreadPoolExecutor(15) as pool:
        plans = [make_plan("bash", "-c", "echo $HPCJOBS_JOB_ID >> ran", name="many") for _ in range(15)]
        ids = [done.job_id for done in pool.map(LocalScheduler().submit, plans)]
    for other in others:
        ids += other.communicate()[0].split()
        assert other.returncode == 0
    assert sorted(ids, key=lambda i: int(i[1:])) == [f"L{n}" for n in range(1, 31)]
    until(lambda: not machine.local.queue())
    assert {record.state for record in machine.local.account(ids)} == {State.COMPLETED}
    assert sorted((machine.here / "ran").read_text().split()) == sorted(ids)


def test_a_job_waits_for_another_and_runs_when_it_succeeded(machine: Machine) -> None:
    first = machine.held("first")
    after = machine.submit("true", dependency=f"afterok:{first}")
    unrelated = machine.submit("true")
    assert machine.end_of(unrelated).state == State.COMPLETED
    assert machine.queue()[after] == ("PENDING", "Dependency")
    machine.let_go("first")
    assert machine.end_of(after).state == State.COMPLETED


def test_who_may_go_on_is_woken_and_need_not_ask_again_and_again(machine: Machine) -> None:
    machine.held("first", cpus_per_task=2)
    jobs = [machine.submit("true", cpus_per_task=2) for _ in range(8)]
    machine.wait_for("first")
    machine.let_go("first")
    records = [machine.end_of(job) for job in jobs]
    gaps = [(b.started or 0) - (a.ended or 0) for a, b in pairwise(records)]
    # Asking once a second would cost half a second each time, several times what such a job takes.
    assert sum(gaps) < sum(record.elapsed_s or 0 for record in records)


def test_a_failure_cancels_what_needed_success_and_frees_what_needed_failure(machine: Machine) -> None:
    first = machine.held("first", then="exit 3")
    ok = machine.submit("true", dependency=f"afterok:{first}")
    any_ = machine.submit("true", dependency=f"afterany:{first}")
    not_ok = machine.submit("true", dependency=f"afternotok:{first},afterany:{any_}")
    machine.let_go("first")
    ended = machine.end_of(ok)
    assert (ended.state, ended.reason, ended.started) == (State.CANCELLED, "DependencyNeverSatisfied", None)
    assert machine.end_of(any_).state == State.COMPLETED
    assert machine.end_of(not_ok).state == State.COMPLETED


@pytest.mark.parametrize("text", ["afterok:L99", "afterok", "aftercorr:L1", "afterok:../x", "singleton"])
def test_a_dependency_that_cannot_be_is_refused(machine: Machine, text: str) -> None:
    with pytest.raises(RequestError, match="dependency"):
        machine.submit("true", dependency=text)


def test_tasks_of_an_array_run_no_more_at_once_than_its_limit(machine: Machine) -> None:
    arguments = (
        'mkdir one || touch clash; sleep 0.05; rmdir one; echo "$SLURM_ARRAY_JOB_ID $SLURM_ARRAY_TASK_ID" >> ran'
    )
    job = machine.submit("bash", "-c", arguments, array="0-3,7%1", name="many")
    ends = machine.ends_of(job)
    assert list(ends) == [f"{job}_{index}" for index in (0, 1, 2, 3, 7)]
    assert {record.state for record in ends.values()} == {State.COMPLETED}
    assert (machine.here / "ran").read_text().splitlines() == [f"{job} {index}" for index in (0, 1, 2, 3, 7)]
    assert not (machine.here / "clash").exists()
    assert (machine.plans[job].run_dir / "7" / "state.json").exists()
    assert machine.log(f"{job}_7") == ""


def test_each_task_of_an_array_takes_slots_and_those_behind_it_wait(machine: Machine) -> None:
    os.mkfifo(machine.here / "go")
    job = machine.submit("bash", "-c", "read -r _ < go", array="1-3")
    behind = machine.submit("true")
    until(lambda: [s for s, _ in machine.queue().values()].count("RUNNING") == 2)
    assert machine.queue() == {
        f"{job}_[3]": ("PENDING", "Resources"),
        f"{job}_1": ("RUNNING", None),
        f"{job}_2": ("RUNNING", None),
        behind: ("PENDING", "Priority"),
    }
    with open(machine.here / "go", "w") as gate:
        gate.write("1\n2\n3\n")
        gate.flush()
        machine.local.cancel([job])
    assert machine.end_of(behind).state == State.COMPLETED


def test_an_array_at_its_own_limit_holds_back_nobody(machine: Machine) -> None:
    os.mkfifo(machine.here / "go")
    job = machine.submit("bash", "-c", "read -r _ < go", array="1-3%1")
    until(lambda: f"{job}_1" in machine.queue())
    behind = machine.submit("true")
    assert machine.end_of(behind).state == State.COMPLETED
    assert machine.queue()[f"{job}_[2-3]"] == ("PENDING", "JobArrayTaskLimit")


def test_a_job_after_an_array_waits_for_all_tasks_and_sees_one_that_failed(machine: Machine) -> None:
    job = machine.submit("bash", "-c", "exit $(( SLURM_ARRAY_TASK_ID == 2 ))", array="0-3")
    ok = machine.submit("true", dependency=f"afterok:{job}")
    one = machine.submit("true", dependency=f"afterok:{job}_3")
    not_ok = machine.submit("true", dependency=f"afternotok:{job}")
    assert machine.end_of(not_ok).state == State.COMPLETED
    assert machine.end_of(ok).state == State.CANCELLED
    assert machine.end_of(one).state == State.COMPLETED
    assert [record.exit_code for record in machine.records(job).values()] == [0, 0, 1, 0]


def test_one_waiting_task_of_an_array_can_be_cancelled(machine: Machine) -> None:
    job = machine.submit("bash", "-c", "sleep 0.2", array="0-3%1")
    machine.local.cancel([f"{job}_2"])
    assert machine.record(f"{job}_2").state == State.CANCELLED
    states = [record.state.value for record in machine.ends_of(job).values()]
    assert states == ["COMPLETED", "COMPLETED", "CANCELLED", "COMPLETED"]


@pytest.mark.parametrize("text", ["3-1", "a", "0-3%0", "0-3%", "1,,2", "0-99999", "-1"])
def test_an_array_that_cannot_be_is_refused(machine: Machine, text: str) -> None:
    with pytest.raises(RequestError, match="array"):
        machine.submit("true", array=text)
