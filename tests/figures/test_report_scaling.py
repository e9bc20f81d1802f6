"""The figures of ``report scaling``, from summaries and rows of sacct, by the formulas of a textbook."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import ok, within
from run_summaries import accounted, clock, summary_of_steps, write_summary
from scipy import optimize, stats
from scripted_cluster import ScriptedCluster, read_duration, read_table

SIZES, REPEATS = (1, 2, 4), 4
CPU_HOUR, GPU_HOUR, NODE_HOUR = 0.02, 1.5, 0.25
CPU_W, GPU_W, NODE_W = 4, 300, 120


@pytest.fixture
def study(cluster: ScriptedCluster) -> dict[int, list[dict[str, Any]]]:
    return study_of(cluster, "speed", seed=11)


def study_of(cluster: ScriptedCluster, name: str, *, seed: int, slower: float = 1.0) -> dict[int, list[dict[str, Any]]]:
    """By nodes: for each run its summary, and what sacct says."""
    chance = np.random.default_rng(seed)
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    ok("scale", "-N", ",".join(map(str, SIZES)), "--repeats", str(REPEATS), "--name", name, "train.py")
    rows, runs = [], dict[int, list[dict[str, Any]]]()
    for cell in ok("sweep", "results", f"study-{name}", "--json").json:
        nodes = cell["params"]["param.nodes"]
        scatter = chance.lognormal(0, 0.02 * nodes)
        left = summary_of_steps(chance, step_s=slower * (0.15 + 0.02 * np.log2(nodes)) * scatter, ranks=nodes)
        write_summary(Path(cell["folder"]), left)
        lasted, waited = int(chance.integers(300, 900)), int(chance.integers(10, 5000))
        busy = int(chance.uniform(0.3, 1) * 16 * nodes * lasted)
        job = accounted(cell["job_id"], nodes=nodes, lasted=lasted, waited=waited, TotalCPU=clock(busy))
        job["AllocTRES"] = job["AllocTRES"].replace("gres/gpu=0", f"gres/gpu={2 * nodes}")
        used = int(chance.uniform(1, 200 * nodes))
        step = job | {"JobID": f"{cell['job_id']}.0", "NTasks": str(nodes), "TRESUsageInTot": f"gres/gpuutil={used}"}
        rows += [job, step]
        runs.setdefault(nodes, []).append({
            "left": left, "waited": waited, "cpu": busy / (16 * nodes * lasted),
            "gpu": used / 2 / nodes / 100,
            "paid": lasted / 3600 * nodes * (NODE_HOUR + 16 * CPU_HOUR + 2 * GPU_HOUR),
            "watt_hours": lasted / 3600 * nodes * (16 * CPU_W + 2 * GPU_W + 16 / 64 * NODE_W),
        })  # fmt: skip
    cluster.account([*cluster.accounted(), *rows])
    return runs


def printed_interval(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+(?:e[-+]\d+)?", text.replace(",", ""))]


def reach_of(*terms: tuple[dict[int, Any], int]) -> tuple[float, float]:
    """Standard error and degrees of freedom of a sum of means: each term is the logarithms of a study, and a size.

    The variance of a size is that of its runs, and two degrees of freedom's worth of the mean of all sizes.
    """
    free, sizes = REPEATS - 1, len(SIZES)
    shares: dict[tuple[int, int], float] = {}
    variances: dict[tuple[int, int], float] = {}
    for logs, n in terms:
        for size in SIZES:
            key = id(logs), size
            own = free if size == n else 0
            shares[key] = shares.get(key, 0.0) + (own + 2 / sizes) / (free + 2) / REPEATS
            variances[key] = float(logs[size].var(ddof=1))
    parts = [share * variances[key] for key, share in shares.items()]
    equal = sum(shares.values()) ** 2 / sum(share**2 / free for share in shares.values())
    measured = sum(parts) ** 2 / sum(part**2 / free for part in parts)
    return float(np.sqrt(sum(parts))), float(equal**0.6 * measured**0.4)


def test_each_column_of_a_size_is_what_summaries_and_sacct_give(study: dict[int, list[dict[str, Any]]]) -> None:
    table = re.split(r"^LAW ", ok("report", "scaling", "speed").out, flags=re.MULTILINE)[0]
    rows = {int(row["NODES"]): row for row in read_table(table, "NODES")}
    assert list(rows) == list(SIZES)
    logs = {n: np.log([run["left"]["throughput"]["value"] for run in runs]) for n, runs in study.items()}
    for n, row in rows.items():
        mean = logs[n].mean()
        error, freedom = reach_of((logs, n))
        reach = stats.t.ppf(0.975, freedom) * error
        expected = np.exp([mean, mean - reach, mean + reach])
        assert printed_interval(row["IMAGES/S"]) == pytest.approx(expected, rel=0.006)
        assert (int(row["RANKS"]), int(row["RUNS"])) == (n, REPEATS)
        if n > 1:
            error, freedom = reach_of((logs, n), (logs, 1))
            reach = stats.t.ppf(0.975, freedom) * error
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
        assert percent("GPU") == pytest.approx(np.median([run["gpu"] for run in study[n]]), abs=0.0051)
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


LAWS = {
    "Amdahl": lambda n, x1, serial: x1 / (serial + (1 - serial) / n),
    "Gustafson": lambda n, x1, serial: x1 * (serial + (1 - serial) * n),
    "USL": lambda n, x1, sigma, kappa: x1 * n / (1 + sigma * (n - 1) + kappa * n * (n - 1)),
    "logarithmic": lambda n, x1, serial, log: x1 * n / (1 + serial * (n - 1) + log * n * np.log2(n)),
}


def test_the_laws_have_the_least_squares_and_the_outlook_is_theirs(study: dict[int, list[dict[str, Any]]]) -> None:
    """No other parameters come nearer to the runs; knee and prediction lie on the best law that is not excluded."""
    out = ok("report", "scaling", "speed", "--target", "0.9").out
    nodes = np.array([n for n, runs in study.items() for _ in runs], float)
    rates = np.array([run["left"]["throughput"]["value"] for runs in study.values() for run in runs])
    fits: dict[str, list[dict[str, str]]] = {}
    table = out[out.index("LAW ") :].partition("\nAmdahl")
    printed = read_table(table[0] + table[1] + table[2].replace("\nRuns", "\n\nRuns", 1), "LAW")
    for row in (row for row in printed if row["LAW"] in LAWS and row["PARAMETER"]):
        fits.setdefault(row["LAW"], []).append(row)
    assert fits.keys() == LAWS.keys()
    best: dict[str, Any] = {}
    for name, rows in fits.items():
        law = LAWS[name]

        def misses(values: Any, law: Any = law) -> Any:
            return np.log(rates / law(nodes, *values))

        shown = [printed_interval(row["VALUE"])[0] for row in rows]
        low = [1e-9, *[0] * (len(shown) - 1)]
        best[name] = optimize.least_squares(
            misses, np.maximum(shown, 1e-4), bounds=(low, np.inf), xtol=1e-14, ftol=1e-14
        ).x
        square = float(np.sqrt(np.mean(misses(best[name]) ** 2)))
        assert float(rows[0]["RESIDUALS"].removesuffix("%")) / 100 == pytest.approx(square, abs=6e-4), name
        assert shown == pytest.approx(best[name], rel=0.02, abs=2e-3), name
    reached = 1
    for n in SIZES[1:]:
        if not reaches(study, n, 0.9):
            break
        reached = n
    assert f"Efficiency of 90% or more was measured up to {reached} node" in out
    predicted = re.search(r"Prediction for 8 nodes: ([\d,]+) images/s \(([\d,]+) to ([\d,]+), if", out)
    assert predicted is not None, out
    value, low, high = (float(text.replace(",", "")) for text in predicted.groups())
    possible = [name for name, rows in fits.items() if rows[0]["VERDICT"] != "excluded"]
    ends = [LAWS[name](8, *best[name]) for name in possible]
    assert min(abs(value / end - 1) for end in ends) < 2e-3
    assert low <= min(ends) * 1.002
    assert high >= min(max(ends), 8 * rates[nodes == 1].mean()) / 1.002
    knee = re.search(r"The knee of the law is at ([\d.]+) nodes", out)
    if knee is not None:
        efficiency = [
            LAWS[name](float(knee[1]), *best[name]) / LAWS[name](1, *best[name]) / float(knee[1]) for name in possible
        ]
        assert min(abs(each - 0.9) for each in efficiency) < 0.005


def test_the_ratio_to_another_study_and_its_bounds_are_those_of_a_t_test(
    cluster: ScriptedCluster, study: dict[int, list[dict[str, Any]]]
) -> None:
    other = study_of(cluster, "after", seed=12, slower=1.05)
    Path("ref.yaml").write_text("sizes: {2: {throughput: 1}, 4: {efficiency: 0.999}}\n", encoding="utf-8")
    answer = within("report", "scaling", "speed", "--baseline", "after", "--check", "ref.yaml")
    assert answer.code == 1
    rows = {row["NODES X TASKS"]: row for row in read_table(answer.out, "NODES X TASKS")}
    means = {}
    sides = [
        {n: np.log([run["left"]["throughput"]["value"] for run in runs[n]]) for n in SIZES} for runs in (study, other)
    ]
    for n in SIZES:
        far = sides[0][n].mean() - sides[1][n].mean()
        error, freedom = reach_of((sides[0], n), (sides[1], n))
        reach = stats.t.ppf(0.975, freedom) * error
        p_value = 2 * stats.t.sf(abs(far) / error, freedom)
        row = rows[f"{n}x1"]
        assert printed_interval(row["RATIO"]) == pytest.approx(np.exp([far, far - reach, far + reach]), abs=0.0051)
        assert row["SIGNIFICANT AT 5 %"].startswith("yes" if p_value < 0.05 else "no")
        (shown,) = re.findall(r"p [=<] ([\d.e-]+)", row["SIGNIFICANT AT 5 %"])
        assert float(shown) == pytest.approx(p_value, rel=0.06) or p_value < float(shown)
        means[n] = np.exp(sides[0][n].mean())
    assert f"held: throughput at 2x1: {means[2]:,.0f}, at least 1\n" in answer.out
    (reached, least) = re.findall(r"MISSED: efficiency at 4x1: ([\d.]+), at least ([\d.]+)", answer.out)[0]
    assert (float(reached), float(least)) == (pytest.approx(means[4] / means[1] / 4, rel=0.006), 0.999)
    assert advised_nodes() == max(n for n in SIZES if reaches(study, n, 0.8))


def reaches(study: dict[int, list[dict[str, Any]]], nodes: int, target: float) -> bool:
    """By the lower bound of the interval of each size up to this one."""
    logs = {n: np.log([run["left"]["throughput"]["value"] for run in runs]) for n, runs in study.items()}
    bounds = []
    for n in SIZES[1 : SIZES.index(nodes) + 1]:
        error, freedom = reach_of((logs, n), (logs, 1))
        low = logs[n].mean() - logs[1].mean() - stats.t.ppf(0.975, freedom) * error
        bounds.append(np.exp(low) / n)
    return all(bound >= target for bound in bounds)


def advised_nodes() -> int:
    (nodes,) = re.findall(r"--nodes=(\d+)", ok("report", "advise", "speed").out)
    return int(nodes)


def report_of_times(cluster: ScriptedCluster, name: str, times: dict[int, list[int]]) -> str:
    """The report of a study whose program leaves nothing: its jobs took these seconds by sacct."""
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    repeats = len(times[1])
    ok("scale", "-N", ",".join(map(str, times)), "--repeats", str(repeats), "--name", name, "train.py")
    left = {nodes: list(seconds) for nodes, seconds in times.items()}
    for cell in ok("sweep", "results", f"study-{name}", "--json").json:
        nodes = cell["params"]["param.nodes"]
        row = accounted(cell["job_id"], nodes=nodes, lasted=left[nodes].pop())
        cluster.account([*cluster.accounted(), row])
    return ok("report", "scaling", name).out


def test_jobs_that_took_the_same_seconds_have_the_interval_of_their_rounding(cluster: ScriptedCluster) -> None:
    """Slurm cuts start and end to seconds: the error of their difference lies between -1 and 1, most often near 0."""
    random = np.random.default_rng(4)
    error_s = float(np.std(random.uniform(size=(2, 10**6)).T @ [1, -1]))
    out = report_of_times(cluster, "whole", {1: [60, 60, 60], 2: [33, 33, 33], 4: [20, 20, 20]})
    rows = {int(row["NODES"]): row for row in read_table(re.split(r"^LAW ", out, flags=re.MULTILINE)[0], "NODES")}
    for nodes, seconds in ((1, 60), (2, 33), (4, 20)):
        reach = 1.96 * error_s / seconds
        bounds = 3600 / seconds * np.exp([0, -reach, reach])
        assert printed_interval(rows[nodes]["RUNS/H"]) == pytest.approx(bounds, rel=0.006)
        if nodes > 1:
            both = 1.96 * error_s * np.hypot(1 / 60, 1 / seconds)
            ratio = 60 / seconds * np.exp([0, -both, both])
            assert printed_interval(rows[nodes]["SPEED-UP"]) == pytest.approx(ratio, abs=0.006)
    assert "Efficiency of 80% or more was measured up to 2 nodes (by the lower bounds" in out
    assert "p < " not in out, "a second more or less explains what Amdahl's law misses"


def test_runs_with_the_same_figure_have_no_scatter_to_test_a_law_with(cluster: ScriptedCluster) -> None:
    """A rate that is printed with few digits: neither an interval, nor a p-value of solver errors, nor a prediction."""
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    for name in ("even", "alike"):
        ok("scale", "-N", "1,2,4,8", "--repeats", "3", "--name", name, "train.py")
        for cell in ok("sweep", "results", f"study-{name}", "--json").json:
            nodes = cell["params"]["param.nodes"]
            left = {"throughput": {"value": 1000 * nodes, "unit": "images/s"}}
            write_summary(Path(cell["folder"]), left)
            cluster.account([*cluster.accounted(), accounted(cell["job_id"], nodes=nodes)])
    out = ok("report", "scaling", "even", "--baseline", "alike").out
    assert "The runs of each size have the same figure, so their scatter is not known" in out
    assert "p = " not in out
    assert "Prediction" not in out
    table = out[out.index("LAW ") :].partition("\nThe runs")[0]
    serial = [row["VALUE"] for row in read_table(table, "LAW") if row["PARAMETER"] in ("serial", "sigma", "log")]
    assert serial == ["0"] * len(serial)
    assert {row["SIGNIFICANT AT 5 %"] for row in read_table(out, "NODES X TASKS")} == {"scatter not known"}
    assert "(by their values: their scatter is not known)" in out


def interval_of(logs: dict[Any, Any], weights: dict[Any, float], rounding: dict[Any, float]) -> list[float]:
    """A sum of means of sizes with any numbers of runs, and its bounds: factors, not logarithms.

    Each size's variance is that of its runs, and two degrees of freedom's worth of the mean variance of all sizes, less
    where it has fewer runs than the mean. That of rounded times is added.
    """
    free = {size: len(runs) - 1 for size, runs in logs.items()}
    own = {size: float(runs.var(ddof=1)) if len(runs) > 1 else 0.0 for size, runs in logs.items()}
    repeated = [size for size in logs if free[size]]
    parts = dict.fromkeys(logs, 0.0)
    rounded = 0.0
    for size, weight in weights.items():
        prior = 2 * min(1.0, free[size] * len(repeated) / sum(free.values()))
        share = weight**2 / len(logs[size]) / (prior + free[size])
        for other in repeated:
            parts[other] += share * prior / len(repeated)
        parts[size] += share * free[size]
        rounded += weight**2 * rounding[size]
    scatter = sum(parts[size] * own[size] for size in logs)
    equal = sum(parts.values()) ** 2 / sum(parts[size] ** 2 / free[size] for size in repeated)
    measured = scatter**2 / sum((parts[size] * own[size]) ** 2 / free[size] for size in repeated)
    freedom = equal**0.6 * measured**0.4 * ((scatter + rounded) / scatter) ** 2
    reach = float(stats.t.ppf(0.975, freedom) * np.sqrt(scatter + rounded))
    middle = sum(weight * float(logs[size].mean()) for size, weight in weights.items())
    return [float(np.exp(middle + each)) for each in (0, -reach, reach)]


def test_an_odd_study_is_measured_by_the_jobs_that_tell(cluster: ScriptedCluster) -> None:
    """Sizes of nodes and tasks, unlike numbers of runs, jobs that failed, were requeued or took no time."""
    Path("train.py").write_text("print('hello')\n", encoding="utf-8")
    ok("scale", "-N", "1,2", "--ntasks-per-node", "1,2", "--repeats", "4", "--weak", "--name", "odd", "train.py")
    chance, logs, rounding, left_out = np.random.default_rng(8), {}, {}, []
    rows: list[dict[str, str]] = []
    rates: dict[tuple[int, int], list[float]] = {}
    squares: dict[tuple[int, int], list[float]] = {}
    for number, cell in enumerate(ok("sweep", "results", "study-odd", "--json").json):
        nodes, tasks = cell["params"]["param.nodes"], int(cell["params"]["ntasks_per_node"])
        lasted = int(chance.normal(24, 2)) + 4 * nodes * tasks
        row = accounted(cell["job_id"], nodes=nodes, lasted=lasted)
        if number == 1:
            row["State"] = "FAILED"
        elif number == 6:
            row |= {"ElapsedRaw": "0", "End": row["Start"]}
        elif number == 11:
            later = {"Submit": row["End"], "Start": row["End"], "End": str(int(row["End"]) + 9), "ElapsedRaw": "9"}
            rows.append(row | {"State": "PREEMPTED"})
            row |= later
        rows.append(row)
        if number in (1, 6, 11):
            left_out.append(cell["job_id"])
            continue
        rates.setdefault((nodes, tasks), []).append(nodes * tasks * 3600 / lasted)
        squares.setdefault((nodes, tasks), []).append(1 / 6 / lasted**2)
    cluster.account(rows)
    logs = {size: np.log(values) for size, values in rates.items()}
    rounding = {size: float(np.mean(values)) for size, values in squares.items()}
    answer = within("report", "scaling", "odd")
    printed = {(int(row["NODES"]), int(row["RANKS"]) // int(row["NODES"])): row
               for row in read_table(answer.out.partition("Sizes (")[0], "NODES")}  # fmt: skip
    assert printed.keys() == rates.keys()
    for size, row in printed.items():
        assert int(row["RUNS"]) == len(rates[size])
        mean = interval_of(logs, {size: 1}, rounding)
        assert printed_interval(row["RANK-RUNS/H"]) == pytest.approx(mean, rel=0.006), size
        if size != (1, 1):
            ratio = interval_of(logs, {size: 1, (1, 1): -1}, rounding)
            assert printed_interval(row["SPEED-UP"]) == pytest.approx(ratio, abs=0.0051), size
            efficiency = 100 * np.array(ratio) / size[0] / size[1]
            assert printed_interval(row["EFFICIENCY"]) == pytest.approx(efficiency, abs=0.51), size
    for job_id in left_out:
        assert f"job {job_id}: " in answer.err.replace("\n", " ")
    assert "requeued" in answer.err
