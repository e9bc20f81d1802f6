"""The figures of ``sweep results``, from the summaries of its cells and the rows of sacct."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commandline import ok
from run_summaries import accounted, write_summary
from scripted_cluster import ScriptedCluster, read_table


def test_the_rows_of_a_sweep_are_what_its_cells_left(cluster: ScriptedCluster) -> None:
    chance = np.random.default_rng(2)
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    arguments = ("sweep", "run", "--set", "lr=0.1,0.2,0.4,0.8", "--name", "lr")
    ok(*arguments, "train.py")
    cells = ok(*arguments, "--dry-run", "--json", "train.py").json
    rows, expected = [], dict[str, tuple[float, int]]()
    for task, cell in enumerate(cells):
        lasted, loss = int(chance.integers(100, 9000)), float(chance.uniform(0.01, 5))
        folder = Path("runs/sweep-lr/cells") / cell["cell"]
        write_summary(folder, {"schema": "hpcjobs.summary/1", "loss": loss})
        row = accounted(f"100_{task}", lasted=lasted)
        begun, ended = int(row["Start"]), int(row["End"])
        state = {"job_id": f"100_{task}", "state": "COMPLETED", "exit_code": 0, "started": begun, "ended": ended,
                 "nodes": "n1"}  # fmt: skip
        (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
        rows.append(row)
        expected[f"100_{task}"] = loss, lasted
    cluster.account(rows)
    table = read_table(ok("sweep", "results", "lr").out, "LR")
    assert {row["JOB"] for row in table} == expected.keys()
    for row in table:
        loss, lasted = expected[row["JOB"]]
        assert float(row["LOSS"]) == pytest.approx(loss, rel=0.005)
        assert float(row["ELAPSED_S"].replace(",", "")) == lasted
    (best,) = read_table(ok("sweep", "results", "lr", "--min", "loss").out, "LR")
    assert best["JOB"] == min(expected, key=lambda job_id: expected[job_id][0])
    (reported,) = read_table(ok("report", "sweep", "lr").out, "LR")
    assert reported["JOB"] == best["JOB"]
    assert float(reported["LOSS"]) == pytest.approx(expected[best["JOB"]][0], rel=0.005)
