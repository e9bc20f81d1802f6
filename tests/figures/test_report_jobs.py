"""``report jobs``: its columns and sums, computed by pandas from the rows of sacct."""

from __future__ import annotations

import html
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from commandline import ok
from run_summaries import accounted, clock
from sacct_rows import recorded_rows, simulated_rows
from scripted_cluster import ScriptedCluster, read_duration, read_table

CPU_HOUR, GPU_HOUR, NODE_HOUR = 0.02, 1.5, 0.25
CPU_W, GPU_W, NODE_W = 4, 300, 120
CORES = 64
SOURCES = ("simulated", "22.05.8", "23.11.4", "24.11.5")


def rows_of(source: str) -> list[dict[str, str]]:
    return simulated_rows(7) if source == "simulated" else recorded_rows(source)


def amount(text: str, resource: str) -> float:
    """Of ``mem`` in ``cpu=4,mem=2048M``."""
    match = re.search(rf"(?:^|,){resource}=([\d.]+)([KMGT]?)", text)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else 0.0


def seconds(clock: str) -> float:
    days, _, rest = clock.rpartition("-")
    parts = [0.0, 0.0, *map(float, rest.split(":"))][-3:]
    return int(days or 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def attempts_of(rows: list[dict[str, str]]) -> pd.DataFrame:
    """One row per ended attempt, with its figures; a step belongs to the last job above it."""
    frame = pd.DataFrame(rows).fillna("")
    is_job = ~frame["JobID"].str.contains(".", regex=False)
    frame["attempt"] = is_job.cumsum()
    counts = ["Submit", "Eligible", "Start", "End", "ElapsedRaw", "NNodes", "NCPUS", "NTasks"]
    frame[counts] = frame[counts].apply(pd.to_numeric, errors="coerce").fillna(0)
    jobs, steps = frame[is_job].copy(), frame[~is_job & ~frame["JobID"].str.endswith(".extern")].copy()
    steps["mem"] = [amount(text, "mem") for text in steps["TRESUsageInTot"]]
    most = {}
    for attempt, part in steps[steps["mem"] > 0].groupby("attempt"):
        # Whoever has begun and not ended at the begin of a step holds memory then.
        most[attempt] = max(
            part[(part["Start"] <= at) & ((part["End"] > at) | (part["Start"] == at))]["mem"].sum()
            for at in part["Start"]
        )
    jobs["mem_used"] = jobs["attempt"].map(most)
    jobs["mem"] = [amount(text, "mem") for text in jobs["AllocTRES"]]
    jobs["gpus"] = [amount(text, "gres/gpu") for text in jobs["AllocTRES"]]
    of_steps = steps.assign(cpu=[seconds(text or "0:0") for text in steps["TotalCPU"]]).groupby("attempt")["cpu"].sum()
    jobs["cpu_s"] = [seconds(text or "0:0") for text in jobs["TotalCPU"]]
    jobs["cpu_s"] = jobs["cpu_s"].where(jobs["cpu_s"] > 0, jobs["attempt"].map(of_steps).fillna(0))
    began = jobs["Start"].where(jobs["Start"] > 0, jobs["End"])
    jobs["wait"] = (began - jobs["Eligible"]).clip(lower=0)
    hours = jobs["ElapsedRaw"] / 3600
    jobs["cost"] = hours * (jobs["NCPUS"] * CPU_HOUR + jobs["gpus"] * GPU_HOUR + jobs["NNodes"] * NODE_HOUR)
    share = (jobs["NCPUS"] / (jobs["NNodes"] * CORES)).where(jobs["Partition"] == "gpu", 1.0).clip(upper=1)
    counted = pd.to_numeric(jobs["ConsumedEnergyRaw"], errors="coerce").fillna(0)
    jobs["is_measured"] = (counted > 0) & (share == 1) & (jobs["Partition"] == "gpu")
    modelled = (jobs["NCPUS"] * CPU_W + jobs["gpus"] * GPU_W + jobs["NNodes"] * share * NODE_W) * jobs["ElapsedRaw"]
    jobs["energy"] = modelled.where(~jobs["is_measured"], counted)
    return jobs[(jobs["End"] > 0) & (jobs["Start"] > 0)]


def assert_percent(text: str, share: float) -> None:
    assert float(text.rstrip("%")) == pytest.approx(100 * share, abs=0.5001), (text, share)


def assert_energy(text: str, joules: float, *, is_measured: bool) -> None:
    assert text.startswith("~") is not is_measured, text
    number, unit = text.lstrip("~").replace(",", "").split()
    assert "e" not in number, text
    assert float(number) * {"Wh": 3600, "kWh": 3.6e6}[unit] == pytest.approx(joules, rel=0.006), (text, joules)


@pytest.mark.parametrize("source", SOURCES)
def test_each_column_of_a_job_is_what_the_rows_of_sacct_give(cluster: ScriptedCluster, source: str) -> None:
    rows = rows_of(source)
    cluster.account(rows)
    attempts = attempts_of(rows)
    parents = sorted({re.split(r"[_+]", job)[0] for job in attempts["JobID"]}, key=int)
    printed = {row["JOB"]: row for row in read_table(ok("report", "jobs", *parents).out, "JOB")}
    for job_id, every in attempts.groupby("JobID"):
        last, shown = every.iloc[-1], printed[str(job_id)]
        if last["State"].split()[0] in ("REQUEUED", "PENDING", "RUNNING"):
            continue
        assert [shown["CPUS"], shown["GPUS"], shown["NODES"]] == [
            f"{last['NCPUS']:.0f}", f"{last['gpus']:.0f}", f"{last['NNodes']:.0f}"
        ]  # fmt: skip
        for header, value in (("WAIT", last["wait"]), ("ELAPSED", last["ElapsedRaw"])):
            shown_s, unit_s = read_duration(shown[header])
            assert 0 <= value - shown_s < unit_s, (job_id, header)
        if last["cpu_s"] > 0 and last["ElapsedRaw"] > 0:
            assert_percent(shown["CPU"], last["cpu_s"] / (last["NCPUS"] * last["ElapsedRaw"]))
        if last["mem_used"] > 0:
            assert_percent(shown["MEM"], last["mem_used"] / last["mem"])
        else:
            assert shown["MEM"] == "-"
        if len(every) > 1:
            assert_percent(shown["GOODPUT"], last["ElapsedRaw"] / every["ElapsedRaw"].sum())
        assert_energy(shown["ENERGY"], every["energy"].sum(), is_measured=bool(every["is_measured"].all()))
        cost = every["cost"].sum()
        if 0 < cost < 0.005:
            assert shown["COST"] == "< 0.01 EUR"
        else:
            assert shown["COST"] == f"{cost:.2f} EUR"


def sums_of(attempts: pd.DataFrame) -> dict[str, float]:
    known = attempts[attempts["mem_used"].notna()]
    measured = attempts[attempts["cpu_s"] > 0]
    hours = attempts["ElapsedRaw"] / 3600
    put_back = attempts["State"] == "PREEMPTED"
    return {
        "JOBS": float((~put_back).sum()),
        "FAILED": float(attempts["State"].isin(["FAILED", "TIMEOUT"]).sum()),
        "CPU H": float((hours * attempts["NCPUS"]).sum()),
        "GPU H": float((hours * attempts["gpus"]).sum()),
        "CPU": measured["cpu_s"].sum() / (measured["NCPUS"] * measured["ElapsedRaw"]).sum(),
        "MEM": (known["mem_used"] * known["ElapsedRaw"]).sum() / (known["mem"] * known["ElapsedRaw"]).sum(),
        "MEAN WAIT": float(attempts["wait"].mean()),
        "LOST H": float(hours[put_back].sum()),
        "ENERGY": float(attempts["energy"].sum()),
        "COST": float(attempts["cost"].sum()),
    }


def assert_sums(shown: dict[str, str], attempts: pd.DataFrame) -> None:
    for header, value in sums_of(attempts).items():
        if header in ("CPU", "MEM"):
            assert_percent(shown[header], value)
        elif header == "MEAN WAIT":
            shown_s, unit_s = read_duration(shown[header])
            assert 0 <= value - shown_s < unit_s
        elif header == "ENERGY":
            assert_energy(shown[header], value, is_measured=bool(attempts["is_measured"].all()))
        else:
            number, _, unit = shown[header].partition(" ")
            assert float(number) == pytest.approx(value, abs=0.00501), header
            assert unit == ("EUR" if header == "COST" else ""), header


def test_the_sums_of_all_jobs_are_those_of_every_attempt(cluster: ScriptedCluster) -> None:
    rows = simulated_rows(8)
    cluster.account(rows)
    (shown,) = read_table(ok("report", "jobs", "-a", "--since", "20d").out, "ALL")
    assert_sums(shown, attempts_of(rows))


@pytest.mark.parametrize("by", ["user", "name"])
def test_the_sums_of_a_group_are_those_of_its_attempts(cluster: ScriptedCluster, by: str) -> None:
    rows = simulated_rows(9)
    cluster.account(rows)
    printed = read_table(ok("report", "jobs", "-a", "--since", "20d", "--by", by).out, by.upper())
    groups = dict(list(attempts_of(rows).groupby({"user": "User", "name": "JobName"}[by])))
    assert {row[by.upper()] for row in printed} == set(groups)
    for row in printed:
        assert_sums(row, groups[row[by.upper()]])


def test_the_gpu_use_and_the_memory_of_the_fullest_node_are_those_of_the_steps(cluster: ScriptedCluster) -> None:
    rows = simulated_rows(10)
    cluster.account(rows)
    printed = {row["job_id"]: row for row in ok("report", "jobs", "-a", "--since", "20d", "--json").json}
    frame = pd.DataFrame(rows)
    frame["attempt"] = (~frame["JobID"].str.contains(".", regex=False)).cumsum()
    steps = frame[frame["JobID"].str.contains(r"\.\d+$")].copy()
    steps["job"] = steps["JobID"].str.partition(".")[0]
    steps["gpus"] = [amount(text, "gres/gpu") for text in steps["AllocTRES"]]
    steps["percent"] = [amount(text, "gres/gpuutil") for text in steps["TRESUsageInTot"]]
    steps["lasted"] = steps["ElapsedRaw"].astype(float).clip(lower=1)
    is_checked = False
    for job_id, every in steps.groupby("job"):
        last = every[every["attempt"] == every["attempt"].max()]
        if (last["gpus"] > 0).all():
            first, second = last["Start"].astype(int), last["End"].astype(int)
            moments = np.unique([*first, *second])
            # Each step may use all GPUs of the job; whoever runs beside it shares them.
            busy_s = sum(b - a for a, b in itertools.pairwise(moments) if ((first <= a) & (second >= b)).any())
            share = (last["percent"] / last["gpus"] / 100 * last["lasted"]).sum() / (busy_s + (first == second).sum())
            assert printed[job_id]["gpu_utilization"] == pytest.approx(min(1, share), abs=1e-9), job_id
            is_checked = True
        begin, end = every["Start"].astype(int), every["End"].astype(int)
        node = every["MaxRSS"].astype(float) * np.ceil(every["NTasks"].astype(int) / every["NNodes"].astype(int))
        held = [
            node[(every["attempt"] == attempt) & (begin <= at) & ((end > at) | (begin == at))].sum() + (5 << 20)
            for attempt, at in zip(every["attempt"], begin, strict=True)
        ]
        assert printed[job_id]["mem_per_node_bytes"] == pytest.approx(max(held)), job_id
    assert is_checked


def job_of(job_id: str, *, nodes: int = 1, gpus: int = 0) -> dict[str, str]:
    """A job of one hour, with the batch script that started its steps."""
    return accounted(job_id, nodes=nodes) | {
        "AllocTRES": f"billing=16,cpu={16 * nodes},gres/gpu={gpus},mem={64 * nodes}G,node={nodes}"
    }


def step_of(job: dict[str, str], suffix: str, begin_s: int, end_s: int, **columns: str) -> dict[str, str]:
    """A step of one task on one node, from ``begin_s`` to ``end_s`` after the start of the job."""
    start = int(job["Start"])
    times = {"Start": str(start + begin_s), "End": str(start + end_s), "ElapsedRaw": str(end_s - begin_s)}
    blank = dict.fromkeys(("User", "Partition", "QOS", "TimelimitRaw", "ReqMem", "AllocTRES"), "")
    return job | blank | times | {"JobID": f"{job['JobID']}.{suffix}", "NNodes": "1", "NTasks": "1"} | columns


def read_row(job_id: str) -> dict[str, Any]:
    (row,) = ok("report", "jobs", job_id, "--json").json
    return dict(row)


@pytest.mark.parametrize(
    ("gpus", "steps"),
    [
        (1, [(0, 3600, 1, 50), (0, 3600, 1, 50)]),
        (1, [(0, 3600, 1, 60), (10, 3590, 1, 1)]),
        (2, [(0, 3000, 2, 150), (0, 3000, 2, 20), (3000, 3600, 1, 80)]),
        (2, [(0, 3600, 1, 100), (0, 3600, 1, 20)]),
        (4, [(0, 1800, 4, 100), (900, 2700, 2, 100), (1800, 3600, 4, 350)]),
    ],
    ids=["halves of one GPU", "a monitor beside", "both on all, then one", "a GPU each", "a part of the time"],
)
def test_steps_that_share_gpus_add_up_to_what_the_gpus_did(
    cluster: ScriptedCluster, gpus: int, steps: list[tuple[int, int, int, int]]
) -> None:
    """Second by second: the percents of the steps that ran, over their GPUs, which are no more than the job's."""
    job = job_of("501", gpus=gpus)
    rows = [
        step_of(job, str(n), begin, end, AllocTRES=f"cpu=1,gres/gpu={held}", TRESUsageInTot=f"gres/gpuutil={percent}")
        for n, (begin, end, held, percent) in enumerate(steps)
    ]
    batch = step_of(job, "batch", 0, 3600, AllocTRES=f"cpu=1,gres/gpu={gpus}", TRESUsageInTot="gres/gpuutil=0")
    cluster.account([job, batch, *rows])
    did = had = 0.0
    for second in range(3600):
        ran = [(held, percent) for begin, end, held, percent in steps if begin <= second < end]
        did += sum(percent / 100 for _, percent in ran)
        had += min(gpus, sum(held for held, _ in ran))
    assert read_row("501")["gpu_utilization"] == pytest.approx(did / had, abs=1e-9)


def test_the_memory_of_gpus_is_that_of_the_steps_at_once(cluster: ScriptedCluster) -> None:
    """Two steps of 10 and 20 GiB side by side, then one of 25: the job's GPUs held 30 at most."""
    job = job_of("502", gpus=2)
    rows = [
        step_of(
            job, str(n), begin, end, AllocTRES="cpu=1,gres/gpu=1", TRESUsageInTot=f"gres/gpumem={held}G,gres/gpuutil=9"
        )
        for n, (begin, end, held) in enumerate([(0, 1800, 10), (0, 1800, 20), (1800, 3600, 25)])
    ]
    cluster.account([job, *rows])
    assert read_row("502")["gpu_mem_bytes"] == 30 << 30


@pytest.mark.parametrize("seed", range(4))
def test_the_memory_of_the_fullest_node_is_that_of_the_steps_on_it(cluster: ScriptedCluster, seed: int) -> None:
    """Steps of some nodes each, at random times; one has no list of nodes and may be anywhere."""
    chance, nodes = np.random.default_rng(seed), 4
    job = job_of("503", nodes=nodes)
    rows = [step_of(job, "batch", 0, 3600, NodeList="n1", MaxRSS=str(1 << 20), TRESUsageInTot=f"mem={1 << 20}")]
    held = {node: np.zeros(3600) for node in range(1, nodes + 1)}
    held[1] += 1 << 20
    for n in range(6):
        first, last = sorted(int(node) for node in chance.integers(1, nodes + 1, 2))
        begin, end = sorted(int(second) for second in chance.choice(3600, 2, replace=False))
        rss, width = int(chance.integers(1 << 20, 8 << 30)), last - first + 1
        places, known = (range(1, nodes + 1), "") if n == 5 else (range(first, last + 1), f"n[{first}-{last}]")
        rows.append(
            step_of(job, str(n), begin, end, NNodes=str(width), NTasks=str(width), NodeList=known, MaxRSS=str(rss),
                    AveRSS=str(rss), TRESUsageInTot=f"mem={rss * width}")
        )  # fmt: skip
        for node in places:
            held[node][begin:end] += rss
    cluster.account([job, *rows])
    assert read_row("503")["mem_per_node_bytes"] == max(of_node.max() for of_node in held.values())


def test_a_job_that_has_not_started_has_neither_energy_nor_cost(cluster: ScriptedCluster) -> None:
    pending = accounted(
        "504", State="PENDING", Start="Unknown", End="Unknown", ElapsedRaw="0", NodeList="None assigned"
    )
    cancelled = accounted("505", State="CANCELLED by 7", Start="None", ElapsedRaw="0", NodeList="None assigned")
    ran = accounted("506", lasted=1800)
    cluster.account([pending, cancelled, ran])
    printed = {row["JOB"]: row for row in read_table(ok("report", "jobs", "504", "505", "506").out, "JOB")}
    for job_id in ("504", "505"):
        assert (printed[job_id]["ENERGY"], printed[job_id]["COST"]) == ("-", "-")
    assert printed["506"]["COST"] == f"{0.5 * (16 * CPU_HOUR + NODE_HOUR):.2f} EUR"
    (total,) = read_table(ok("report", "jobs", "504", "505").out, "ALL")
    assert (total["ENERGY"], total["COST"]) == ("-", "-")


def table_of(page: str, header: str) -> list[dict[str, str]]:
    """The rows of the table of the page whose first header is this, cells by header."""
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        rows = [
            [
                " ".join(html.unescape(re.sub(r"<[^>]+>", "", cell)).split())
                for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            ]
            for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
        ]
        if rows[0][0] == header:
            return [dict(zip(rows[0], cells, strict=True)) for cells in rows[1:]]
    raise AssertionError(f"no table of {header}")


def test_the_waits_of_the_page_are_percentiles_of_the_jobs(cluster: ScriptedCluster) -> None:
    """The smallest wait that so many of the jobs did not exceed: nine of ten waited no longer."""
    chance = np.random.default_rng(5)
    waits = {1: chance.integers(0, 40_000, 10), 2: chance.integers(0, 90_000, 7), 16: chance.integers(0, 9000, 2)}
    rows = [
        accounted(str(600 + number), nodes=nodes, waited=int(waited), lasted=100)
        for number, (nodes, waited) in enumerate((nodes, waited) for nodes, each in waits.items() for waited in each)
    ]
    cluster.account(rows)
    ok("report", "jobs", "-a", "--page", "week")
    page = Path("week/index.html").read_text(encoding="utf-8")

    def assert_rank(text: str, every: Any, share: float) -> None:
        length, unit = read_duration(text)
        (waited,) = [value for value in np.unique(every) if 0 <= value - length < unit][:1]
        assert np.mean(every <= waited) >= share > np.mean(every < waited), (text, share)

    shown = {row["nodes of the job"]: row for row in table_of(page, "nodes of the job")}
    columns = {"10 %": 0.1, "median": 0.5, "90 %": 0.9, "longest": 1.0}
    for name, nodes in (("1", 1), ("2 to 3", 2), ("16 to 31", 16)):
        assert int(shown[name]["jobs"]) == len(waits[nodes])
        for column, share in columns.items():
            assert_rank(shown[name][column], waits[nodes], share)
    text = " ".join(html.unescape(page).split())
    sentence = re.search(r"Half of the jobs waited at most (\S+), nine of ten at most (\S+)\.", text)
    assert sentence is not None
    for text, share in zip(sentence.groups(), (0.5, 0.9), strict=True):
        assert_rank(text, np.concatenate(list(waits.values())), share)


def test_the_next_request_of_a_name_is_enough_for_its_largest_job(cluster: ScriptedCluster) -> None:
    """Two jobs of one name: 12.8 of 32 CPUs of a task were busy, and 3.2 of 16 in the last one."""
    rows = []
    for number, (cpus, busy) in enumerate(((32, 12.8), (16, 3.2))):
        job = accounted(str(700 + number), lasted=3600, TotalCPU=clock(busy * 3600), NCPUS=str(cpus))
        job["Submit"] = job["Eligible"] = str(int(job["Submit"]) + number)
        job["AllocTRES"] = f"billing={cpus},cpu={cpus},mem=64G,node=1"
        rows += [job, step_of(job, "0", 0, 3600)]
    cluster.account(rows)
    ok("report", "jobs", "-a", "--page", "week")
    page = Path("week/index.html").read_text(encoding="utf-8")
    (row,) = table_of(page[page.index("CPU hours without work") :], "user")
    assert float(row["hours"]) == pytest.approx(32 - 12.8 + 16 - 3.2, abs=0.051)
    advised = re.search(r"--cpus-per-task=(\d+)", row["next request"])
    assert advised is None or int(advised[1]) >= 12.8
