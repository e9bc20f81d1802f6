"""Rows of sacct: simulated ones of a busy week, and those that were recorded from several versions."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data" / "sacct"
_SEPARATOR = "\x1f\x02\x1d\x07"
_COLUMNS = (
    *("JobID", "JobIDRaw", "JobName", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Reason", "Submit"),
    *("Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NTasks", "NCPUS", "ReqMem", "ReqTRES"),
    *("AllocTRES", "NodeList", "TotalCPU", "MaxRSS", "AveRSS", "TRESUsageInTot", "TRESUsageInAve", "ConsumedEnergyRaw"),
)


def recorded_rows(version: str) -> list[dict[str, str]]:
    """The rows of tests/data/sacct: values may hold newlines, so they are counted off."""
    has = set((DATA / f"recorded-{version}.helpformat").read_text(encoding="utf-8").split())
    columns = ["JobID", *(["Restarts"] if "Restarts" in has else []), *(name for name in _COLUMNS[1:] if name in has)]
    values = (DATA / f"recorded-{version}.txt").read_bytes().decode().split(_SEPARATOR)
    rows, row = [], list[str]()
    for value in values:
        if len(row) == len(columns) - 1:  # the last column and the first of the next row
            last, _, first = value.partition("\n")
            rows.append(dict(zip(columns, [*row, last], strict=True)))
            row = [first]
        else:
            row.append(value)
    return rows


def simulated_rows(seed: int, *, jobs: int = 60) -> list[dict[str, str]]:
    """Jobs that ended within the last five days: of all sizes, some requeued, with steps beside and behind others."""
    chance = np.random.default_rng(seed)
    rows: list[dict[str, str]] = []
    for number in range(jobs):
        submitted = int(time.time()) - int(chance.integers(3 * 86400, 5 * 86400))
        nodes, name = int(chance.integers(1, 5)), f"job{number % 7}"
        cpus = nodes * int(chance.choice([4, 16, 64]))
        gpus = nodes * int(chance.choice([0, 1, 4]))
        attempts = int(chance.choice([1, 1, 1, 2, 3]))
        for attempt in range(attempts):
            state = "PREEMPTED" if attempt + 1 < attempts else str(chance.choice(["COMPLETED", "FAILED", "TIMEOUT"]))
            eligible = submitted + int(chance.choice([0, 0, 700]))
            start = eligible + int(chance.integers(0, 9000))
            end = start + int(chance.integers(70, 30000))
            job = {
                "JobID": str(500 + number), "JobIDRaw": str(500 + number), "JobName": name, "User": f"u{number % 3}",
                "Account": "lab", "Partition": "gpu", "QOS": "normal", "State": state,
                "ExitCode": "0:0" if state == "COMPLETED" else "1:0", "Reason": "None", "Submit": str(submitted),
                "Eligible": str(eligible), "Start": str(start), "End": str(end), "ElapsedRaw": str(end - start),
                "TimelimitRaw": "900", "NNodes": str(nodes), "NTasks": "", "NCPUS": str(cpus),
                "ReqMem": f"{64 * nodes}G", "ReqTRES": "",
                "AllocTRES": f"billing={cpus},cpu={cpus},gres/gpu={gpus},mem={64 * nodes}G,node={nodes}",
                "NodeList": f"n[1-{nodes}]", "TotalCPU": _clock(float(chance.uniform(0, cpus * (end - start)))),
                "MaxRSS": "", "AveRSS": "", "TRESUsageInTot": "", "TRESUsageInAve": "",
                "ConsumedEnergyRaw": str(int(chance.choice([0, 0, 5_000_000]))),
            }  # fmt: skip
            rows += [job, *_steps(job, chance)]
            submitted = end
    return rows


def _steps(job: dict[str, str], chance: np.random.Generator) -> list[dict[str, str]]:
    begun, ended, nodes = int(job["Start"]), int(job["End"]), int(job["NNodes"])
    gpus = int(job["AllocTRES"].partition("gres/gpu=")[2].partition(",")[0])
    spans = [("batch", begun, ended, 1), ("extern", begun, ended, nodes)]
    for number in range(int(chance.integers(1, 5))):
        first, last = sorted(int(moment) for moment in chance.integers(begun, ended, 2))
        spans.append((str(number), first, last, nodes * int(chance.choice([1, 4]))))
    steps = []
    for suffix, first, last, tasks in spans:
        rss = int(chance.integers(1 << 20, 8 << 30)) if suffix not in ("batch", "extern") else 5 << 20
        used = [f"cpu=00:10:00,energy=0,mem={rss * tasks}"]
        if gpus:
            share = 0.0 if suffix in ("batch", "extern") else float(chance.uniform(1, 100 * gpus))
            used.append(f"gres/gpumem={gpus << 30},gres/gpuutil={share:.0f}")
        steps.append(
            job | dict.fromkeys(("User", "Partition", "QOS", "TimelimitRaw", "ReqMem", "ReqTRES", "Reason"), "")
            | {"JobID": f"{job['JobID']}.{suffix}", "Start": str(first), "End": str(last),
               "ElapsedRaw": str(last - first), "NTasks": str(tasks), "MaxRSS": str(rss), "AveRSS": str(rss),
               "TRESUsageInTot": ",".join(used), "TRESUsageInAve": used[0], "State": "COMPLETED"}
        )  # fmt: skip
    return steps


def _clock(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
