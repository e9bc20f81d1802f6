"""Checks whether the centre's policies allow what `hpcjobs update` changes of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import RequestError
from hpcjobs.job.limits import check_change
from hpcjobs.job.models import Job
from hpcjobs.run.control import KEYS
from hpcjobs.run.identity import own_cluster
from hpcjobs.run.index import Entry
from hpcjobs.run.rerun import read_manifest
from hpcjobs.site.centre import policies_of_job
from hpcjobs.site.resources import Resources, gpus_in_gres, node_range
from hpcjobs.units import requested_time, slurm_time, time_limit_s


def check_settings(settings: Sequence[str], entry: Entry, limit_s: float | None) -> None:
    """Compare the job of ``entry``, as ``settings`` of scontrol would change it, with the centre's policies.

    Args:
        limit_s: the time limit that the job has now; None: none.

    Raises:
        RequestError: a policy refuses the change, or the job's manifest, which is needed for that, cannot be read.
    """
    policies = policies_of_job(entry.site, filter(None, (entry.cluster, own_cluster("slurm", entry.slurm_conf))))
    if not policies or entry.is_foreign:  # what a job without a manifest asked for was never ours to check
        return
    job = changed = read_manifest(Path(entry.run_dir)).job
    for setting in settings:
        name, _, value = setting.partition("=")
        for field in (field for field, key in KEYS.items() if key == name):
            changed = _change(changed, field, _new_limit(value, limit_s) if field == "time" else value)
    check_change(job, changed, policies)


def _change(job: Job, field: str, value: str) -> Job:
    """``job`` with ``field`` as scontrol is told to set it."""
    try:
        stated = msgspec.convert({field: value or None}, Resources, strict=False)
        fields = {
            name: new for name in Resources.__struct_fields__ if (new := getattr(stated, name)) is not msgspec.UNSET
        }
        if field == "gres" and gpus_in_gres(value)[0]:
            fields["gpus_per_node"] = int(str(fields["gpus_per_node"]).rpartition(":")[2])
        sources = job.sources | dict.fromkeys(fields, "update")
        job = replace(job, resources=replace(job.resources, **fields), sources=sources)
        if field == "nodes":
            least, most = node_range(value)
            return replace(job, nodes=least, max_nodes=most if most > least else None, spare=0)
        return replace(job, time_limit_s=time_limit_s(value)) if field == "time" else job
    except (ValueError, msgspec.ValidationError) as error:
        raise RequestError(f"update {field}: {error}") from error


def _new_limit(value: str, now_s: float | None) -> str:
    """The time limit that ``value`` leads to, in Slurm's spelling; ``+`` and ``-`` change the one that the job has."""
    sign, rest = (value[0], value[1:]) if value[:1] in ("+", "-") else ("", value)
    try:
        limit = requested_time(rest)
    except ValueError as error:
        raise RequestError(f"update time: {error}") from error
    if not sign:
        return limit
    step_s = time_limit_s(limit) or 0
    return "UNLIMITED" if now_s is None else slurm_time(max(60, round(now_s) + (step_s if sign == "+" else -step_s)))
