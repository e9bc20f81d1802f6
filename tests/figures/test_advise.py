"""The figures of ``report advise``, from the rows of sacct: what was requested, what was used, what would do."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from commandline import ok
from run_summaries import accounted, clock
from scripted_cluster import ScriptedCluster

GIB = 1 << 30


def slurm_seconds(text: str) -> int:
    days, _, rest = text.rpartition("-")
    hours, minutes, seconds = map(int, rest.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize("seed", range(5))
def test_the_advice_names_what_was_used_and_a_value_that_holds_it(cluster: ScriptedCluster, seed: int) -> None:
    chance = np.random.default_rng(seed)
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    job_id = ok("submit", "--json", "-N", "2", "train.py").json["job_id"]
    lasted, tasks = int(chance.integers(600, 20_000)), 2
    rss, busy = int(chance.uniform(0.5, 20) * GIB), float(chance.uniform(0.2, 3))
    job = accounted(job_id, nodes=2, lasted=lasted, TotalCPU=clock(busy * lasted))
    step = job | {
        "JobID": f"{job_id}.0", "NTasks": str(tasks), "MaxRSS": str(rss), "AveRSS": str(rss), "User": "",
        "TimelimitRaw": "", "ReqMem": "", "Partition": "", "QOS": "",
        "TRESUsageInTot": f"cpu=00:10:00,mem={2 * rss}", "TRESUsageInAve": f"cpu=00:05:00,mem={rss}",
    }  # fmt: skip
    cluster.account([job, step])
    out = ok("report", "advise", job_id).out
    used, mem = re.findall(r"requested 64G of memory per node, used (\S+) at most: --mem=(\S+)", out)[0]
    sizes = {"M": 1 << 20, "G": GIB}
    assert float(used[:-1]) * sizes[used[-1]] == pytest.approx(rss, rel=0.05)
    assert 4 / 3 * rss <= int(mem[:-1]) * sizes[mem[-1]] <= max(4 / 3 * rss + 4 * GIB, 256 << 20)
    limit, took, enough = re.findall(r"requested (\S+), took (\S+); .*: --time=(\S+)", out)[0]
    assert (slurm_seconds(limit), slurm_seconds(took)) == (900 * 60, lasted)
    assert 1.5 * lasted <= slurm_seconds(enough) < 1.5 * lasted + 300
    each, idle_from, share, cpus = re.findall(
        r"(\d+) CPUs per task, of which (\S+) were busy \((\d+)%\): --cpus-per-task=(\d+)", out
    )[0]
    assert int(each) == 16
    assert float(idle_from) == pytest.approx(int(busy * lasted) / lasted / tasks, abs=0.051)
    assert int(share) == pytest.approx(100 * busy / 32, abs=0.51)
    assert busy / tasks <= int(cpus) <= 1.2 * busy / tasks + 1


def test_cpus_per_task_are_of_all_tasks_that_ran_at_once(cluster: ScriptedCluster) -> None:
    """Three steps of one task each, side by side on 48 CPUs, then one of two tasks: 16 CPUs per task."""
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    job_id = ok("submit", "--json", "-n", "3", "train.py").json["job_id"]
    job = accounted(job_id, nodes=3, lasted=3600, TotalCPU=clock(6 * 3600))
    middle = str(int(job["Start"]) + 3000)
    spans = [(job["Start"], middle, "1")] * 3 + [(middle, job["End"], "2")]
    steps = [
        job | {"JobID": f"{job_id}.{n}", "NTasks": tasks, "User": "", "TimelimitRaw": "", "Start": begin, "End": end}
        for n, (begin, end, tasks) in enumerate(spans)
    ]
    cluster.account([job, *steps])
    assert "16 CPUs per task, of which 2.0 were busy (12%): --cpus-per-task=3" in ok("report", "advise", job_id).out


def test_a_task_and_a_job_whose_id_a_stranger_got_have_their_own_advice(cluster: ScriptedCluster) -> None:
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    array = ok("submit", "--json", "--array", "0-1", "train.py").json["job_id"]
    tasks = [accounted(f"{array}_{n}", nodes=1, lasted=3600, State="TIMEOUT") for n in range(2)]
    mine = ok("submit", "--json", "train.py").json["job_id"]
    others = accounted(mine, nodes=1, lasted=3600, State="OUT_OF_MEMORY", User="bob")
    cluster.account([*tasks, accounted(mine, nodes=1, lasted=3600, State="TIMEOUT"), others])
    assert list(re.findall(r"^\S+:", ok("report", "advise", f"{array}_1").out, re.MULTILINE)) == [f"{array}_1:"]
    out = ok("report", "advise", mine).out
    assert ("--time=" in out, "--mem=" in out) == (True, False), out
    cluster.account([accounted(mine, nodes=1, lasted=3600, State="TIMEOUT", User="")])
    assert "--time=" in ok("report", "advise", mine).out, "a source that does not tell the user"


@pytest.mark.parametrize(
    ("state", "advice"), [("TIMEOUT", "--time=1-06:00:00"), ("OUT_OF_MEMORY", "--mem=128G")], ids=["time", "memory"]
)
def test_what_a_job_ran_out_of_is_doubled(cluster: ScriptedCluster, state: str, advice: str) -> None:
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    job_id = ok("submit", "--json", "-N", "2", "train.py").json["job_id"]
    cluster.account([accounted(job_id, nodes=2, State=state)])
    assert advice in ok("report", "advise", job_id).out.split()


def test_a_requeued_job_is_advised_what_all_its_attempts_needed(cluster: ScriptedCluster) -> None:
    """Three hours, then a quarter of an hour from a checkpoint: the next job begins without one."""
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    job_id = ok("submit", "--json", "train.py").json["job_id"]
    first = accounted(job_id, lasted=3 * 3600, State="PREEMPTED")
    second = accounted(job_id, lasted=900) | {"Submit": first["End"], "Eligible": first["End"]}
    second |= {"Start": first["End"], "End": str(int(first["End"]) + 900)}

    def step(job: dict[str, str], held: int) -> dict[str, str]:
        used = f"cpu=00:10:00,mem={held}"
        return job | {"JobID": f"{job_id}.0", "NTasks": "1", "MaxRSS": str(held), "AveRSS": str(held), "User": "",
                      "TimelimitRaw": "", "TRESUsageInTot": used, "TRESUsageInAve": used}  # fmt: skip

    cluster.account([first, step(first, 12 * GIB), second, step(second, 2 * GIB)])
    printed = ok("report", "advise", job_id).out.split()
    assert "--mem=16G" in printed
    assert "--time=04:55:00" in printed  # 1.5 x 3.25 hours, to five minutes


def test_the_moments_of_start_are_those_that_slurm_estimates(cluster: ScriptedCluster) -> None:
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    job_id = ok("submit", "--json", "train.py").json["job_id"]
    cluster.account([accounted(job_id, lasted=600)])
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 7330))
    cluster.estimate(f"sbatch: Job 7 to start at {begin} using 16 processors on nodes n1 in partition gpu")
    assert f"{job_id}: submitted now it would start in 2h02m either way" in ok("report", "advise", job_id).out


@pytest.mark.parametrize("other_first", [True, False])
def test_advice_is_not_that_of_another_job_of_mine_with_the_id(cluster: ScriptedCluster, other_first: bool) -> None:
    """The other one was submitted with sbatch 40 days before, and the controller has lost its state since then."""
    Path("train.py").write_text("print('hello')\n")
    mine = ok("submit", "--json", "train.py").json["job_id"]
    own = accounted(mine, nodes=1, lasted=3600, State="TIMEOUT")
    before = int(time.time()) - 40 * 86_400
    times = {"Submit": before, "Eligible": before, "Start": before + 60, "End": before + 3660}
    columns = {name: str(value) for name, value in times.items()}
    other = accounted(mine, nodes=1, lasted=3600, State="OUT_OF_MEMORY", JobName="other", **columns)
    cluster.account([other, own] if other_first else [own, other])
    advice = ok("report", "advise", mine).out
    assert "--time=" in advice
    assert "--mem=" not in advice
