"""The cost that ``where`` prints, from the prices of the site file and what Slurm would allocate."""

from __future__ import annotations

import re
import time

import pytest
from commandline import ok
from scripted_cluster import ScriptedCluster, read_table

CPU_HOUR, GPU_HOUR, NODE_HOUR = 0.02, 1.5, 0.25
WHOLE_CPUS, WHOLE_GPUS = 64, 4


@pytest.mark.parametrize(
    ("options", "nodes", "cpus", "gpus", "ending"),
    [
        (("-N", "2", "--ntasks-per-node", "3", "-c", "4"), 2, 12, 0, ""),
        (("-N", "2", "--gpus-per-node", "1", "-c", "4"), 2, 4, 1, ""),
        (("-N", "3", "--gpus-per-node", "1", "--exclusive"), 3, WHOLE_CPUS, WHOLE_GPUS, ""),
        (("-N", "2", "--gpus-per-node", "2", "-c", "4", "--retries", "on"), 2, 8, 2, " per attempt"),
    ],
    ids=["cpus", "gpus", "whole nodes", "retries"],
)
def test_the_cost_of_a_placement_is_that_of_what_slurm_would_allocate(
    cluster: ScriptedCluster, options: tuple[str, ...], nodes: int, cpus: int, gpus: int, ending: str
) -> None:
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 7330))
    cluster.estimate(f"sbatch: Job 7 to start at {begin} using {cpus} processors on nodes n1 in partition gpu")
    (row,) = read_table(ok("where", "--site", "mine", "-t", "3:00:00", *options, "hostname").out, "SITE")
    assert row["START"] == "in 2h02m"
    assert (row["NODES"], row["TIME"]) == (str(nodes), "03:00:00")
    euros = 3 * nodes * (NODE_HOUR + cpus * CPU_HOUR + gpus * GPU_HOUR)
    printed = re.fullmatch(r"(\S+) node hours, (\S+) EUR( per attempt)?", row["COST AT MOST"])
    assert printed is not None, row
    assert float(printed[1]) == nodes * 3
    assert float(printed[2].replace(",", "")) == pytest.approx(euros, rel=0.005)
    assert (printed[3] or "") == ending
