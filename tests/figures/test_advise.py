"""The figures of ``report advise``, from the rows of sacct: what was requested, what was used, what would do."""

from __future__ import annotations

import re
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
