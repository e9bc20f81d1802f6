"""The summary of a script's run: what its log, its checkpoints and its results say at the end."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from hpcjobs.runtime.exits import ExitCode
from hpcjobs.runtime.step_log import StepLog, read_number
from hpcjobs.runtime.summary import Quantiles, RunSummary, Throughput


def make_summary(
    log: StepLog,
    *,
    stall_s: Sequence[float],
    results: Mapping[str, Any],
    code: int = ExitCode.OK,
    error: str | None = None,
) -> RunSummary:
    """The summary after the newest step of `log`; `error` is the message of a run that failed with exit code `code`."""
    nodes = os.environ.get("HPCJOBS_NNODES", "")
    loss = results.get("loss", log.loss)
    torch = sys.modules.get("torch")
    return RunSummary(
        trainer=log.name,
        strategy=log.name,
        workload=log.name,
        status="completed" if error is None else "failed",
        exit_code=int(code),
        error=error,
        world_size=log.world_size,
        nnodes=int(nodes) if nodes.isdigit() else None,
        job_id=os.environ.get("HPCJOBS_JOB_ID"),
        started_at=_utc(log.started_at),
        ended_at=_utc(time.time()),
        elapsed_s=log.elapsed_s,
        python_version=platform.python_version(),
        torch_version=None if torch is None else str(torch.__version__),
        steps=log.step,
        resumed_from_step=log.first_step or None,
        throughput=None if log.throughput is None or log.unit is None else Throughput(log.throughput, log.unit),
        step_time_s=Quantiles.of(tuple(log.step_s)),
        checkpoint_stall_s=Quantiles.of(stall_s),
        memory_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        loss=loss if isinstance(loss, (int, float)) else None,
        results=dict(results),
    )


def read_result(key: str, value: Any) -> Any:
    """`value` in JSON's types. Raises TypeError, which names the key."""
    if hasattr(value, "detach") or (hasattr(value, "__float__") and not isinstance(value, (int, float, str))):
        number = float(read_number(key, value, "finish"))
        return int(number) if hasattr(value, "__index__") and number.is_integer() else number
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [read_result(f"{key}[{n}]", item) for n, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: read_result(f"{key}.{name}", item) for name, item in value.items()}
    raise TypeError(f"finish(): {key} is a {type(value).__name__}, expected numbers, text, lists or dicts of them")


def _utc(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone.utc).isoformat(timespec="seconds")
