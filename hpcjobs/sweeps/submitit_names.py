"""Translates submitit's names of parameters to the names of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcjobs.errors import RequestError

_OTHER_NAMES = {
    "tasks_per_node": "ntasks_per_node",
    "num_gpus": "gpus_per_node",
    "timeout_min": "time",
    "mem_gb": "mem",
}
NAMES = ("timeout_min", "mem_gb", "tasks_per_node", "array_parallelism", "additional_parameters")
"""Names of submitit that neither a job nor sbatch has."""


def rename(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` of a job, some by names of submitit: ``timeout_min``, ``mem_gb``, ``slurm_partition``.

    Numbers are converted: minutes to a time, gigabytes to a size. ``additional_parameters`` are options themselves.

    Raises:
        RequestError: an option is named twice.
    """
    renamed: dict[str, Any] = {}
    additional = dict(options.get("slurm_additional_parameters") or options.get("additional_parameters") or {})
    given = {name: value for name, value in options.items() if name.removeprefix("slurm_") != "additional_parameters"}
    for name, value in [*given.items(), *additional.items()]:
        plain = name.removeprefix("slurm_")
        own = _OTHER_NAMES.get(plain, plain.replace("-", "_"))
        if own in renamed:
            raise RequestError(f"{name}: {own} has been given by another name too", hint="leave one of them out")
        renamed[own] = _convert(plain, value)
    return renamed


def _convert(name: str, value: Any) -> Any:
    if value is None or name not in ("time", "timeout_min", "mem_gb"):
        return value
    if name == "mem_gb":
        return f"{round(float(value) * 1024)}M"
    return f"{round(float(value) * 60)}s" if name == "timeout_min" else f"{value}m" if isinstance(value, int) else value
