"""``report jobs`` of odd jobs, computed in plain Python from rows of sacct of two shapes: 20.11 and 24.11.

Requeued with another request, heterogeneous, array tasks, steps that overlap in time and on nodes, suspended, without
a time limit, over midnight and the change of the clock, of no length, without TRES.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from commandline import ok
from scripted_cluster import ScriptedCluster, read_duration, read_table

Row = dict[str, str]
GIB, MIB = 1 << 30, 1 << 20
ZONE = ZoneInfo("Europe/Berlin")
NIGHT = int(datetime(2026, 10, 25, 1, 30, tzinfo=ZONE).timestamp())
"""Ninety minutes before clocks go back from 3:00 to 2:00."""
CPU_HOUR, GPU_HOUR, NODE_HOUR = 0.02, 1.5, 0.25
CPU_W, GPU_W, NODE_W, CORES = 4, 300, 120, 64


def clock(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86400)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    if seconds < 3600 and seconds != int(seconds):
        text = f"{rest // 60:02}:{rest % 60 + seconds % 1:06.3f}"
    return f"{days}-{text}" if days else text


def job(job_id: str, submitted: int, started: int | None, lasted: int | None, **columns: object) -> Row:
    """A row; ``lasted`` None: it runs. CPUs, GPUs, memory and nodes are in ``cpus``, ``gpus``, ``mem``, ``nodes``."""
    cpus, gpus, nodes, mem = (columns.pop(name, default) for name, default in
                              (("cpus", 16), ("gpus", 0), ("nodes", 1), ("mem", "64G")))  # fmt: skip
    ended = "Unknown" if started is None or lasted is None else started + lasted
    tres = f"billing={cpus},cpu={cpus}" + (f",gres/gpu={gpus}" if gpus else "") + f",mem={mem},node={nodes}"
    row = {
        "JobID": job_id, "JobIDRaw": re.split("[_+]", job_id)[0], "JobName": "odd", "User": "ada", "Account": "lab",
        "Partition": "gpu", "QOS": "normal", "State": "COMPLETED", "ExitCode": "0:0", "Reason": "None",
        "Submit": submitted, "Eligible": submitted, "Start": "Unknown" if started is None else started, "End": ended,
        "ElapsedRaw": lasted or 0, "TimelimitRaw": 600, "NNodes": nodes, "NTasks": "", "NCPUS": cpus, "ReqMem": mem,
        "ReqTRES": tres, "AllocTRES": "" if started is None else tres, "TotalCPU": "00:00:00",
        "NodeList": "None assigned" if started is None else f"n[1-{nodes}]" if nodes != 1 else "n1",
        "MaxRSS": "", "AveRSS": "", "TRESUsageInTot": "", "TRESUsageInAve": "", "ConsumedEnergyRaw": "0",
    }  # fmt: skip
    return {name: str(value) for name, value in (row | columns).items()}


def step(of: Row, name: str, begin_s: int, end_s: int, **columns: object) -> Row:
    """A step from ``begin_s`` to ``end_s`` after the start of its job."""
    start, tasks, rss = int(of["Start"]), int(str(columns.get("NTasks", 1))), columns.pop("rss", None)
    blank = dict.fromkeys(("User", "Partition", "QOS", "TimelimitRaw", "ReqMem", "ReqTRES", "AllocTRES", "Reason"), "")
    row = of | blank | {
        "JobID": f"{of['JobID']}.{name}", "Start": start + begin_s, "End": start + end_s, "ElapsedRaw": end_s - begin_s,
        "NTasks": tasks, "NNodes": 1, "NCPUS": tasks, "TotalCPU": "00:00:00", "NodeList": of["NodeList"],
    }  # fmt: skip
    if isinstance(rss, int):
        row |= {"MaxRSS": rss, "AveRSS": rss, "TRESUsageInTot": f"cpu=00:00:01,mem={rss * tasks}"}
    return {key: str(value) for key, value in (row | columns).items()}


def requeued(at: int) -> Iterator[Row]:
    """Preempted, then on a node that failed, then complete with another request; the fullest node is of the first."""
    first = job("701", at, at + 60, 7200, State="PREEMPTED", cpus=32, gpus=2, TotalCPU=clock(9000))
    yield from (first, step(first, "batch", 0, 7200, rss=9 * GIB))
    second = job("701", at + 7260, at + 9000, 30, State="NODE_FAIL", cpus=32, gpus=2)
    yield second
    third = job("701", at + 9030, at + 20_000, 5400, cpus=8, gpus=1, mem="32G", TotalCPU=clock(20_000.5), Restarts=2)
    yield from (third, step(third, "batch", 0, 5400, rss=2 * GIB), step(third, "0", 10, 5300, NTasks=4, rss=GIB))


def heterogeneous(at: int) -> Iterator[Row]:
    lead = job("702+0", at, at + 5, 900, cpus=4, TotalCPU=clock(3000), TimelimitRaw="UNLIMITED")
    yield from (lead, step(lead, "batch", 0, 900, rss=300 * MIB), step(lead, "0", 1, 900, rss=2 * GIB))
    other = job("702+1", at, at + 5, 900, cpus=64, gpus=4, nodes=2, mem="256G", JobIDRaw="703", TotalCPU=clock(40_000))
    used = "gres/gpumem=40G,gres/gpuutil=260,mem=20G"
    yield from (other, step(other, "0", 1, 900, NTasks=8, NNodes=2, TRESUsageInTot=used, MaxRSS=3 * GIB,
                            AllocTRES="cpu=64,gres/gpu=4,node=2"))  # fmt: skip


def array(at: int) -> Iterator[Row]:
    for task, lasted in ((1, 1), (2, 86_399), (7, 0)):
        one = job(f"704_{task}", at, at + 10 * task, lasted, JobIDRaw=f"{704 + task}", TotalCPU=clock(lasted * 7.25),
                  State="FAILED" if task == 7 else "COMPLETED", ExitCode="3:0" if task == 7 else "0:0")  # fmt: skip
        yield one
        if lasted:
            yield step(one, "batch", 0, lasted, rss=int(1.5 * GIB))
    yield job("704_[8-9%2]", at, None, None, State="PENDING", Reason="Resources", Eligible=at + 40, JobIDRaw="704")


def overlapping(at: int) -> Iterator[Row]:
    """On four nodes: two steps side by side on two nodes each, one over all, one whose node is not known."""
    one = job("706", at, at + 100, 3600, nodes=4, cpus=64, mem="512G", TotalCPU=clock(150_000))
    yield from (
        one,
        step(one, "batch", 0, 3600, rss=50 * MIB, NodeList="n1"),
        step(one, "extern", 0, 3600, rss=7 * GIB),
    )
    yield step(one, "0", 0, 1800, NTasks=5, NNodes=2, NodeList="n[1-2]", rss=4 * GIB)
    yield step(one, "1", 0, 1800, NTasks=2, NNodes=2, NodeList="n[3,4]", rss=10 * GIB)
    yield step(one, "2", 1700, 3000, NTasks=4, NNodes=4, NodeList="n[1-4]", rss=3 * GIB)
    yield step(one, "3", 2999, 3600, NTasks=1, NodeList="", rss=11 * GIB)
    yield step(one, "4", 1800, 1800, NTasks=1, NodeList="n3", rss=30 * GIB)


def several(at: int) -> Iterator[Row]:
    """One of each: suspended, over midnight, without TRES, exclusive and measured, out of memory, cancelled."""
    halted = job("707", at, at, 1800, End=at + 3600, Suspended="00:30:00", TotalCPU=clock(14_000), cpus=8)
    yield from (halted, step(halted, "batch", 0, 3600, ElapsedRaw=1800, rss=GIB, TotalCPU=clock(14_000)))
    bare = job("708", at, at + 3, 4000, AllocTRES="", ReqTRES="", nodes=2, cpus=12, TimelimitRaw="Partition_Limit")
    halves = {"NTasks": 3, "NNodes": 2, "MaxRSS": 3 * GIB, "AveRSS": 2 * GIB}
    batch = step(bare, "batch", 0, 4000, TotalCPU=clock(900), MaxRSS=GIB, AveRSS="")
    yield from (bare, batch, step(bare, "0", 0, 4000, TotalCPU=clock(8000), **halves))
    full = job(
        "709", at, at + 3, 86_400, nodes=2, cpus=128, mem="1T", ConsumedEnergyRaw=50_000_000, TotalCPU="100-00:00:00"
    )
    yield from (full, step(full, "0", 0, 86_400, NTasks=128, NNodes=2, rss=GIB))
    yield job("710", at, at + 4, 600, State="OUT_OF_MEMORY", ExitCode="0:125", TotalCPU=clock(59.5))
    yield job("711", at, None, None, State="CANCELLED by 1000", Eligible=at + 50, End=at + 450)
    yield job("712", at, None, None, State="CANCELLED by 1000", Eligible="Unknown", End=at + 450)


def rows_of(shape: str, at: int) -> list[Row]:
    rows = [row for kind in (requeued, heterogeneous, array, overlapping, several) for row in kind(at)]
    if shape == "20.11":
        for row in rows:
            row.pop("Restarts", None)
            nodes, mem = int(row["NNodes"]), row["ReqMem"]
            if mem:
                size = int(mem[:-1]) * {"G": 1024, "T": 1 << 20}[mem[-1]]
                row["ReqMem"] = f"{size // nodes}Mn" if int(row["NCPUS"]) % 3 else f"{size // int(row['NCPUS'])}Mc"
            row["TRESUsageInTot"] = re.sub(
                r"mem=(\d+)(?=,|$)", lambda m: f"mem={int(m[1]) // 1024}K", row["TRESUsageInTot"]
            )
            if row["MaxRSS"]:
                row["MaxRSS"] = f"{int(row['MaxRSS']) // 1024}K"
    else:
        rows = [row | {"Restarts": row.get("Restarts", "0")} for row in rows]
    return rows


def size(text: str) -> float:
    match = re.fullmatch(r"([\d.]+)([KMGT]?)[cn]?", text)
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or " ") if match else 0.0


def amount(text: str, resource: str) -> float:
    match = re.search(rf"(?:^|,){resource}=([\d.]+[KMGT]?)", text)
    return size(match[1]) if match else 0.0


def seconds(text: str) -> float:
    days, _, rest = text.rpartition("-")
    parts = [0.0, 0.0, *map(float, rest.split(":"))][-3:]
    return int(days or 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def nodes_of(text: str) -> set[str]:
    inside = re.fullmatch(r"n\[(.*)\]", text)
    if inside is None:
        return {text} if text else set()
    parts = [part.partition("-") for part in inside[1].split(",")]
    return {f"n{n}" for first, _, last in parts for n in range(int(first), int(last or first) + 1)}


def most_at_once(spans: Sequence[tuple[int, int, float]]) -> float:
    """Whoever has begun and not ended at the begin of one; one of no length runs in its second."""
    return max((sum(held for begin, end, held in spans if begin <= at and (end > at or begin == at))
                for at, _, _ in spans), default=0.0)  # fmt: skip


def attempt_of(row: Row, steps: list[Row]) -> dict[str, Any]:
    """The figures of one attempt."""

    def count(text: str) -> int | None:
        return int(text) if text.isdigit() else None

    submit, eligible, start, end = (count(row[name]) for name in ("Submit", "Eligible", "Start", "End"))
    elapsed, cpus, nodes = int(row["ElapsedRaw"]), int(row["NCPUS"]), int(row["NNodes"])
    tres = row["AllocTRES"] or row["ReqTRES"]
    factor = {"c": cpus, "n": nodes}.get(row["ReqMem"][-1:], 1)
    mem = amount(tres, "mem") or size(row["ReqMem"]) * factor
    counted = [one for one in steps if not one["JobID"].endswith(".extern")]
    spans, on_node, tasks = [], defaultdict[str, list[tuple[int, int, float]]](list), []
    for one in counted:
        begin, stop, ntasks, rss = int(one["Start"]), int(one["End"]), int(one["NTasks"]), size(one["MaxRSS"])
        total = amount(one["TRESUsageInTot"], "mem") or (size(one["AveRSS"]) or rss) * ntasks
        spans.append((begin, stop, total))
        each = rss * -(-ntasks // int(one["NNodes"]))
        each = min(each, max(amount(one["TRESUsageInTot"], "mem"), rss)) if "mem=" in one["TRESUsageInTot"] else each
        for node in nodes_of(one["NodeList"]) or nodes_of(row["NodeList"]):
            on_node[node].append((begin, stop, each))
        if not one["JobID"].endswith(".batch"):
            tasks.append((begin, stop, float(ntasks)))
    has_memory = any(one["MaxRSS"] for one in counted)
    cpu = seconds(row["TotalCPU"]) or sum(seconds(one["TotalCPU"]) for one in steps)
    gpus = amount(tres, "gres/gpu")
    gpu_steps = [one for one in counted if "gpuutil" in one["TRESUsageInTot"]]
    ran = start is not None
    hours = elapsed / 3600
    share = min(1, cpus / nodes / CORES)
    is_measured = share == 1 and float(row["ConsumedEnergyRaw"]) > 0
    began = start if ran else end
    return {
        "state": row["State"].split()[0],
        "queue_wait_s": None if began is None or eligible is None else max(0, began - eligible),
        "held_s": None if eligible is None else eligible - submit, "elapsed_s": elapsed, "nodes": nodes, "cpus": cpus,
        "time_limit_s": int(row["TimelimitRaw"]) * 60 if row["TimelimitRaw"].isdigit() else None,
        "gpus": gpus, "tasks": most_at_once(tasks) or (1 if steps else None), "mem_requested_bytes": mem,
        "mem_used_bytes": most_at_once(spans) if has_memory else None,
        "mem_per_node_bytes": max(map(most_at_once, on_node.values())) if has_memory else None,
        "max_rss_bytes": max(size(one["MaxRSS"]) for one in counted) if has_memory else None,
        "cpu_s": cpu if cpu and row["State"] not in ("PENDING", "RUNNING") else None,
        "gpu_utilization": sum(amount(one["TRESUsageInTot"], "gres/gpuutil") for one in gpu_steps) / 100 / gpus
        if gpu_steps else None,
        "cost": hours * (cpus * CPU_HOUR + gpus * GPU_HOUR + nodes * NODE_HOUR) if ran else None,
        "energy_j": None if not ran else float(row["ConsumedEnergyRaw"]) if is_measured
        else elapsed * (cpus * CPU_W + gpus * GPU_W + nodes * share * NODE_W),
        "energy_source": None if not ran else "measured" if is_measured else "modelled",
        "exit_code": None if row["State"] == "PENDING" else int(row["ExitCode"].split(":")[0]),
        "started": start, "ended": end, "steps": len(steps),
    }  # fmt: skip


def attempts_of(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Job -> its attempts."""
    attempts = defaultdict[str, list[dict[str, Any]]](list)
    places = [n for n, row in enumerate(rows) if "." not in row["JobID"]]
    for begin, end in zip(places, [*places[1:], len(rows)], strict=True):
        attempts[rows[begin]["JobID"]].append(attempt_of(rows[begin], list(rows[begin + 1 : end])))
    return attempts


def expected_of(attempts: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a job: its last attempt, and what all of them had."""
    last = dict(attempts[-1])
    known = [one for one in attempts if one["cost"] is not None]
    if known:
        last["cost"], last["energy_j"] = (sum(one[name] for one in known) for name in ("cost", "energy_j"))
    fullest = [one["mem_per_node_bytes"] for one in attempts if one["mem_per_node_bytes"] is not None]
    last["mem_per_node_bytes"] = max(fullest) if fullest else None
    spent = sum(one["elapsed_s"] for one in attempts)
    lost = spent - attempts[-1]["elapsed_s"]
    last |= {"elapsed_all_s": spent, "lost_s": lost, "goodput": 1 - lost / spent if spent else None}
    last["attempts"] = sum(one["started"] is not None for one in attempts) if len(attempts) > 1 else 1
    held = last["cpus"] * last["elapsed_s"]
    last["cpu_efficiency"] = last["cpu_s"] / held if last["cpu_s"] and held else None
    used, requested = last["mem_used_bytes"], last["mem_requested_bytes"]
    last["mem_efficiency"] = used / requested if used is not None and requested else None
    for name in ("started", "ended"):
        moment = last[name]
        text = None if moment is None else datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        last[name] = text
    return last


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("shape", ["20.11", "24.11"])
def test_each_figure_of_an_odd_job_is_what_its_rows_give(cluster: ScriptedCluster, shape: str) -> None:
    rows = rows_of(shape, NIGHT)
    cluster.account(rows)
    printed = {row["job_id"]: row for row in ok("report", "jobs", "-a", "--since", "2026-10-20", "--json").json}
    jobs = attempts_of(rows)
    assert printed.keys() == jobs.keys()
    wrong = {
        (job_id, name): (printed[job_id][name], value)
        for job_id, attempts in jobs.items()
        for name, value in expected_of(attempts).items()
        if printed[job_id][name] != (value if value is None or isinstance(value, str) else pytest.approx(value))
    }
    assert not wrong


@pytest.mark.parametrize("shape", ["20.11", "24.11"])
def test_the_days_of_odd_jobs_are_local_ones(cluster: ScriptedCluster, shape: str) -> None:
    """An attempt counts on the local day of its end, also where the day has 25 hours."""
    rows = [row for hours in (-2, 0, 1, 2, 21, 23, 24) for row in rows_of(shape, NIGHT + 3600 * hours)]
    for number, row in enumerate(rows):
        head, _, rest = row["JobID"].partition(".")
        base = re.match(r"\d+", head)
        assert base is not None
        row["JobID"] = f"{int(base[0]) + 100 * (number * 7 // len(rows))}{head[len(base[0]) :]}" + (rest and f".{rest}")
        row["JobIDRaw"] = row["JobID"]
    cluster.account(rows)
    days = defaultdict[str, list[dict[str, Any]]](list)
    for attempts in attempts_of(rows).values():
        for number, one in enumerate(attempts):
            day = "not ended"
            if one["ended"] is not None:
                utc = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=one["ended"])
                day = utc.astimezone(ZONE).strftime("%Y-%m-%d")
            days[day].append(one | {"is_last": number == len(attempts) - 1})
    shown = {row["DAY"]: row for row in read_table(
        ok("report", "jobs", "-a", "--since", "2026-10-20", "--by", "day").out, "DAY")}  # fmt: skip
    assert shown.keys() == days.keys()
    for day, every in days.items():
        row = shown[day]
        assert int(row["JOBS"]) == sum(one["is_last"] for one in every)
        assert int(row["FAILED"]) == sum(
            one["is_last"] and one["state"] in ("FAILED", "OUT_OF_MEMORY", "NODE_FAIL") for one in every
        )
        sums = {
            "CPU H": sum(one["cpus"] * one["elapsed_s"] for one in every) / 3600,
            "GPU H": sum(one["gpus"] * one["elapsed_s"] for one in every) / 3600,
            "LOST H": sum(one["elapsed_s"] for one in every if not one["is_last"]) / 3600,
        }
        for header, value in sums.items():
            assert float(row[header].replace(",", "")) == pytest.approx(value, abs=0.00501), (day, header)
        waits = [one["queue_wait_s"] for one in every if one["queue_wait_s"] is not None]
        if waits:
            length, unit = read_duration(row["MEAN WAIT"])
            assert 0 <= np.mean(waits) - length < unit, day
        costs = [one["cost"] for one in every if one["cost"] is not None]
        assert row["COST"] == (f"{sum(costs):.2f} EUR" if costs else "-")
        busy = [one for one in every if one["cpu_s"] and one["elapsed_s"]]
        if busy:
            share = sum(one["cpu_s"] for one in busy) / sum(one["cpus"] * one["elapsed_s"] for one in busy)
            assert float(row["CPU"].rstrip("%")) == pytest.approx(100 * share, abs=0.5001), day


def advice_of(job: dict[str, Any]) -> set[str]:
    """The options that the next job of this kind should have, by docs/reports.md."""
    limit, nodes, tasks, took = job["time_limit_s"], job["nodes"], job["tasks"], job["elapsed_all_s"]
    if job["state"] == "OUT_OF_MEMORY":
        return {f"--mem={int(2 * job['mem_requested_bytes'] / nodes / GIB)}G"}
    if job["state"] != "COMPLETED" or took < 60:
        return set()
    advised = set()
    if limit and (enough := max(300, -(-1.5 * took // 300) * 300)) <= limit / 2:
        hours, rest = divmod(int(enough), 3600)
        advised.add(f"--time={hours:02}:{rest // 60:02}:00")
    used = job["mem_per_node_bytes"]
    if used and (enough := max(used * 4 / 3, 256 * MIB)) <= job["mem_requested_bytes"] / nodes / 2:
        quarters, gibibytes = -(-enough // (256 * MIB)), -(-enough // GIB)
        is_large, is_huge = enough >= 2 * GIB, enough >= 16 * GIB
        size = (
            f"{-(-gibibytes // 4) * 4:.0f}G"
            if is_huge
            else f"{gibibytes:.0f}G"
            if is_large
            else f"{256 * quarters:.0f}M"
        )
        advised.add(f"--mem={size}")
    if job["cpu_efficiency"] and tasks and not job["gpus"] and job["cpus"] / tasks >= 2:
        each = max(1, -(-1.2 * job["cpu_efficiency"] * job["cpus"] / tasks // 1))
        advised |= {f"--cpus-per-task={each:.0f}"} if each <= job["cpus"] / tasks / 2 else set()
    share, gpus = job["gpu_utilization"], job["gpus"]
    if share is not None and gpus >= 2 and share <= 0.5:
        each = max(1, -(-1.2 * share * gpus / nodes // 1))
        advised |= {f"--gpus-per-node={each:.0f}"} if each * nodes < gpus else set()
    return advised


def test_the_advice_of_odd_jobs_is_that_of_their_figures(cluster: ScriptedCluster) -> None:
    rows = rows_of("24.11", NIGHT)
    idle = job("713", NIGHT, NIGHT, 7200, gpus=8, nodes=2, cpus=32)
    used = {"TRESUsageInTot": "gres/gpuutil=130,mem=3000M", "AllocTRES": "gres/gpu=8", "MaxRSS": 900 * MIB}
    rows += [idle, step(idle, "0", 0, 7200, NTasks=8, NNodes=2, **used)]
    cluster.account(rows)
    table = read_table(ok("report", "jobs", "-a", "--since", "2026-10-20", "--columns", "job,advice").out, "JOB")
    printed = {row["JOB"]: set(re.findall(r"--[\w-]+=\S+?(?=;|$)", row["ADVICE"])) for row in table}
    expected = {job_id: advice_of(expected_of(attempts)) for job_id, attempts in attempts_of(rows).items()}
    assert printed == expected
    assert set().union(*expected.values()) >= {"--gpus-per-node=1"}
