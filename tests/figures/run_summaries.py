"""Jobs of the scripted cluster that have ended, with what their programs left."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Any

import numpy as np


def accounted(job_id: str, *, nodes: int = 1, waited: int = 60, lasted: int = 3600, **columns: str) -> dict[str, str]:
    """The row of sacct of a job of this user that was submitted just now; ``columns`` replace its values."""
    submitted = int(time.time())
    start, cpus = submitted + waited, 16 * nodes
    return {
        "JobID": job_id, "JobIDRaw": job_id, "JobName": "train", "User": getpass.getuser(),
        "Account": "lab", "Partition": "gpu", "QOS": "normal", "State": "COMPLETED", "ExitCode": "0:0",
        "Reason": "None", "Submit": str(submitted),
        "Eligible": str(submitted), "Start": str(start), "End": str(start + lasted), "ElapsedRaw": str(lasted),
        "TimelimitRaw": "900", "NNodes": str(nodes), "NTasks": "", "NCPUS": str(cpus), "ReqMem": f"{64 * nodes}G",
        "ReqTRES": "", "AllocTRES": f"billing={cpus},cpu={cpus},gres/gpu=0,mem={64 * nodes}G,node={nodes}",
        "NodeList": f"n[1-{nodes}]" if nodes > 1 else "n1", "TotalCPU": "00:00:00", "MaxRSS": "", "AveRSS": "",
        "TRESUsageInTot": "", "TRESUsageInAve": "", "ConsumedEnergyRaw": "0", **columns,
    }  # fmt: skip


def clock(seconds: float) -> str:
    """CPU time as sacct prints it, in whole seconds."""
    days, rest = divmod(int(seconds), 86400)
    return f"{days}-{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"


def summary_of_steps(chance: np.random.Generator, *, step_s: float, ranks: int) -> dict[str, Any]:
    """A run of 500 steps, the first two not measured, of 32 samples on each rank."""
    step = chance.normal(step_s, step_s / 50, 498)
    stall = chance.uniform(step_s, 9 * step_s, 5)
    wait, communication = step * chance.uniform(0.05, 0.2), step[::50] * chance.uniform(0.1, 0.3)

    def quantiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
        median, p95 = np.quantile(values, [0.5, 0.95], method="inverted_cdf")
        return {"median": float(median), "p95": float(p95), "count": len(values), "total": float(values.sum())}

    return {
        "schema": "hpcjobs.summary/1", "trainer": "ddp", "status": "completed", "world_size": ranks,
        "steps": 500, "epochs": 4, "samples": 500 * 32 * ranks, "elapsed_s": float(step.sum() + stall.sum()),
        "throughput": {"value": float(498 * 32 * ranks / step.sum()), "unit": "images/s"},
        "step_time_s": quantiles(step), "data_wait_s": quantiles(wait), "checkpoint_stall_s": quantiles(stall),
        "exposed_communication_s": quantiles(communication) if ranks > 1 else None,
        "loss": float(chance.uniform(0.5, 3)),
    }  # fmt: skip


def write_summary(folder: Path, values: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(values), encoding="utf-8")
