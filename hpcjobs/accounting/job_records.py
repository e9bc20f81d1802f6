"""Builds the accounting's columns without sacct: from squeue, scontrol, the jobs' own files or the local scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import polars as pl

from hpcjobs.accounting.derive import SCHEMA
from hpcjobs.run.folder import MANIFEST
from hpcjobs.run.index import Entry
from hpcjobs.run.state_file import read_json
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.site.models import Site
from hpcjobs.units import memory_bytes, time_limit_s


class ResourceRequest(NamedTuple):
    """What a job requested, from the manifest of its run folder. None: not set."""

    user: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int | None = None
    tasks: int | None = None
    cpus: int | None = None
    gpus: int = 0
    mem_bytes: int | None = None
    time_limit_s: int | None = None


class _RequestedResources(msgspec.Struct):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    mem: str | None = None
    time: str | None = None


class _RequestedJob(msgspec.Struct):
    nodes: int
    ntasks_per_node: int
    resources: _RequestedResources


class _RequestManifest(msgspec.Struct):
    job: _RequestedJob
    user: str | None = None


def read_request(run_dir: Path) -> ResourceRequest:
    """What the manifest of ``run_dir`` says; nothing where there is none."""
    manifest = read_json(run_dir / MANIFEST, _RequestManifest)
    if manifest is None:
        return ResourceRequest()
    job, resources = manifest.job, manifest.job.resources
    nodes, tasks = job.nodes, job.nodes * job.ntasks_per_node
    return ResourceRequest(
        user=manifest.user,
        partition=resources.partition,
        account=resources.account,
        qos=resources.qos,
        nodes=nodes,
        tasks=tasks,
        cpus=tasks * (resources.cpus_per_task or 1),
        gpus=nodes * (resources.gpus_per_node or 0),
        mem_bytes=nodes * memory_bytes(resources.mem) or None if resources.mem else None,
        time_limit_s=time_limit_s(resources.time),
    )


def to_frame(records: Iterable[tuple[JobRecord, Entry | None]], site: Site) -> pl.DataFrame:
    """Rows for `derive.derive`; the request is read from the run folder where there is one."""
    rows = [_row(record, entry, site) for record, entry in records]
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def _row(record: JobRecord, entry: Entry | None, site: Site) -> dict[str, object]:
    request = read_request(Path(entry.run_dir)) if entry is not None else ResourceRequest()
    submitted = record.submitted if record.submitted is not None else (entry.submitted if entry else None)
    rss, waited_until = record.max_rss_bytes, record.started if record.started is not None else record.ended
    return {
        "job_id": record.job_id,
        "job_id_raw": record.job_id,
        "name": record.name or (entry.name if entry else None),
        "user": record.user or request.user,
        "account": request.account,
        "partition": record.partition or request.partition,
        "qos": request.qos,
        "state": record.state.value,
        "reason": record.reason,
        "exit_code": record.exit_code,
        "signal": record.signal,
        "submitted": _round(submitted),
        "eligible": _round(submitted),
        "started": _round(record.started),
        "ended": _round(record.ended),
        "queue_wait_s": _seconds_between(submitted, waited_until),
        "held_s": None,
        "elapsed_s": _round(record.elapsed_s)
        if record.elapsed_s is not None
        else _seconds_between(record.started, record.ended),
        "time_limit_s": request.time_limit_s if record.time_limit_s is None else round(record.time_limit_s),
        "nodes": record.nnodes or request.nodes,
        "tasks": request.tasks,
        "cpus": request.cpus,
        "gpus": request.gpus if entry is not None else None,
        "node_list": record.node_list,
        "mem_requested_bytes": request.mem_bytes,
        # The local scheduler tells the largest process only: x tasks is the same upper estimate as sacct's.
        "mem_used_bytes": rss * (request.tasks or 1) if rss is not None else None,
        "mem_per_node_bytes": rss * (request.tasks or 1) if rss is not None else None,
        "max_rss_bytes": rss,
        "cpu_s": record.cpu_s,
        "steps": None,
        "site": site.name,
        "source": record.source,
        "run_dir": entry.run_dir if entry is not None else None,
    }


def _round(value: float | None) -> int | None:
    return None if value is None else round(value)


def _seconds_between(begin: float | None, end: float | None) -> int | None:
    return None if begin is None or end is None else max(0, round(end - begin))
