"""The records of a local job: its request, its start, its end."""

from __future__ import annotations

import json
from typing import NamedTuple, TypeVar

from hpcjobs.processes.tree import Leader

Dependency = tuple[str, str]
"""How and whom: ``("afterok", "L3")``."""


class EarlySignal(NamedTuple):
    """A signal before the time limit (sbatch --signal)."""

    number: int
    before_s: float
    script_only: bool


class Request(NamedTuple):
    """A submitted job. ``cpus`` and ``gpus`` count for the job, or for one task of an array."""

    job_id: str
    name: str
    run_dir: str
    script: str
    cwd: str
    submitted: float
    cpus: int
    gpus: int
    machine_cpus: int
    machine_gpus: int
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""
    time_limit_s: float | None = None
    early_signal: EarlySignal | None = None
    dependency: tuple[Dependency, ...] = ()
    array: tuple[int, ...] | None = None
    throttle: int | None = None
    """Tasks of the array that may run at once."""
    gpu_names: tuple[str, ...] | None = None
    """The machine's GPUs in the form of CUDA_VISIBLE_DEVICES; None: numbered from 0."""


class Started(NamedTuple):
    """Written when the job gets its slots, and again when its script runs."""

    started: float
    gpus: tuple[str, ...] = ()
    """Names of the job's devices in the form of CUDA_VISIBLE_DEVICES."""
    leader: Leader | None = None


class Ended(NamedTuple):
    """How a job ended. Times in seconds since 1970; None: not known."""

    state: str
    ended: float
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    cpu_s: float | None = None
    max_rss_bytes: int | None = None
    """Peak memory of the largest process."""


Record = TypeVar("Record", Request, Started, Ended)


def plain(record: Request | Started | Ended) -> dict[str, object]:
    """As JSON has it."""
    values = record._asdict()
    early = values.get("early_signal")
    return values if early is None else {**values, "early_signal": early._asdict()}


def read(kind: type[Record], path: str) -> Record | None:
    """The record in the file ``path``. None: not there, or lost with the machine's power before it reached the disk."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    if not text:
        return None
    values = json.loads(text)
    for name, value in values.items():
        if name == "early_signal" and value is not None:
            values[name] = EarlySignal(**value)
        elif isinstance(value, list):
            values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    if kind is Started:
        values["gpus"] = tuple(str(gpu) for gpu in values.get("gpus", ()))  # earlier versions wrote numbers
    return kind(**values)
