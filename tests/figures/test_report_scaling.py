"""The figures of ``report scaling``, from summaries and rows of sacct, by the formulas of a textbook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import ok
from run_summaries import accounted, clock, summary_of_steps, write_summary
from scipy import stats
from scripted_cluster import ScriptedCluster, read_duration, read_table

SIZES, REPEATS = (1, 2, 4), 4
CPU_HOUR, NODE_HOUR = 0.02, 0.25
CPU_W, NODE_W = 4, 120


@pytest.fixture
def study(cluster: ScriptedCluster) -> dict[int, list[dict[str, Any]]]:
    """By nodes: for each run its summary, and what sacct says."""
    chance = np.random.default_rng(11)
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    ok("scale", "-N", ",".join(map(str, SIZES)), "--repeats", str(REPEATS), "--name", "speed", "train.py")
    rows, runs = [], dict[int, list[dict[str, Any]]]()
    for cell in ok("sweep", "results", "study-speed", "--json").json:
        nodes = cell["params"]["param.nodes"]
        scatter = chance.lognormal(0, 0.02 * nodes)
        left = summary_of_steps(chance, step_s=(0.15 + 0.02 * np.log2(nodes)) * scatter, ranks=nodes)
        write_summary(Path(cell["folder"]), left)
        lasted, waited = int(chance.integers(300, 900)), int(chance.integers(10, 5000))
        busy = int(chance.uniform(0.3, 1) * 16 * nodes * lasted)
        rows.append(accounted(cell["job_id"], nodes=nodes, lasted=lasted, waited=waited, TotalCPU=clock(busy)))
        runs.setdefault(nodes, []).append({
            "left": left, "waited": waited, "cpu": busy / (16 * nodes * lasted),
            "paid": lasted / 3600 * nodes * (NODE_HOUR + 16 * CPU_HOUR),
            "watt_hours": lasted / 3600 * nodes * (16 * CPU_W + 16 / 64 * NODE_W),
        })  # fmt: skip
    cluster.account(rows)
    return runs


def printed_interval(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+(?:e[-+]\d+)?", text.replace(",", ""))]


def test_each_column_of_a_size_is_what_summaries_and_sacct_give(study: dict[int, list[dict[str, Any]]]) -> None:
    table = re.split(r"^LAW ", ok("report", "scaling", "speed").out, flags=re.MULTILINE)[0]
    rows = {int(row["NODES"]): row for row in read_table(table, "NODES")}
    assert list(rows) == list(SIZES)
    logs = {n: np.log([run["left"]["throughput"]["value"] for run in runs]) for n, runs in study.items()}
    for n, row in rows.items():
        mean, error = logs[n].mean(), logs[n].std(ddof=1) / np.sqrt(REPEATS)
        reach = stats.t.ppf(0.975, REPEATS - 1) * error
        expected = np.exp([mean, mean - reach, mean + reach])
        assert printed_interval(row["IMAGES/S"]) == pytest.approx(expected, rel=0.006)
        assert (int(row["RANKS"]), int(row["RUNS"])) == (n, REPEATS)
        if n > 1:
            base = logs[1].std(ddof=1) / np.sqrt(REPEATS)
            freedom = (error**2 + base**2) ** 2 / ((error**4 + base**4) / (REPEATS - 1))  # Welch and Satterthwaite
            reach = stats.t.ppf(0.975, freedom) * np.hypot(error, base)
            ratio = np.exp(mean - logs[1].mean() + np.array([0, -reach, reach]))
            assert printed_interval(row["SPEED-UP"]) == pytest.approx(ratio, abs=0.006)
            assert printed_interval(row["EFFICIENCY"]) == pytest.approx(100 * ratio / n, abs=0.51)

        def middle(name: str, runs: list[dict[str, Any]] = study[n]) -> float:
            return float(np.median([run["left"][name]["median"] for run in runs]))

        def percent(name: str, row: dict[str, str] = row) -> float:
            return float(row[name].removesuffix("%")) / 100

        step, wait = middle("step_time_s"), middle("data_wait_s")
        assert float(row["STEP"].removesuffix(" ms")) == pytest.approx(1e3 * step, abs=0.06)
        exposed = middle("exposed_communication_s") / step if n > 1 else 0.0
        assert percent("DATA") == pytest.approx(wait / step, abs=0.0051)
        if n > 1:
            assert percent("COMM.") == pytest.approx(exposed, abs=0.0051)
        assert percent("COMPUTE") == pytest.approx(1 - exposed - wait / step, abs=0.0051)
        left = [run["left"] for run in study[n]]
        stalls = [each["checkpoint_stall_s"]["total"] / each["step_time_s"]["total"] for each in left]
        assert percent("CKPT") == pytest.approx(np.median(stalls), abs=0.0051)
        assert percent("CPU") == pytest.approx(np.median([run["cpu"] for run in study[n]]), abs=0.0051)
        epochs = [each["step_time_s"]["total"] / 498 * 500 / 4 for each in left]
        seconds, unit = read_duration(row["EPOCH"])
        assert seconds <= np.median(epochs) + 0.5
        assert np.median(epochs) < seconds + unit + 0.5
        seconds, unit = read_duration(row["QUEUE WAIT"])
        assert seconds <= np.median([run["waited"] for run in study[n]]) < seconds + unit
        paid = 1e6 * sum(run["paid"] for run in study[n]) / sum(each["samples"] for each in left)
        (cost,) = printed_interval(row["COST / 10⁶ SAMPLES"])
        assert cost == pytest.approx(paid, rel=0.01)
        (energy,) = printed_interval(row["ENERGY"])
        assert row["ENERGY"].startswith("~")  # modelled, by the watts of the site file
        assert energy == pytest.approx(np.median([run["watt_hours"] for run in study[n]]), rel=0.01)
