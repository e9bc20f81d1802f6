"""``monitor.jsonl``, ``monitor-N.jsonl``: the load of a node, a sample per line.

Written by a trainer's ``--monitor``, by ``hpcjobs monitor`` or by ``submit --monitor``, with the same sampler. The last
line is ``{"kind": "end"}``.
"""

import json
import os
import re
from typing import Any, Iterable, List, Mapping, NamedTuple, Optional

from hpcjobs.files import AnyPath
from hpcjobs.record.values import decode_kind

SCHEMA = "hpcjobs.monitor/1"
IMPOSSIBLE = 1e15
"""More than any clock, memory or network has."""
_NAME = re.compile(r"monitor(?:-([0-9]+))?\.jsonl\Z")


class Head(NamedTuple):
    """The first line: the node and the sampler."""

    host: str
    """Host name of the node."""
    started_at: float
    """Seconds since 1970, by the node's clock; `time_s` of a sample counts from here."""
    interval_s: float = 0.0
    """Between two samples."""
    job_id: Optional[str] = None
    """The scheduler's id; null for a trainer outside a job."""
    schema: str = SCHEMA


class Load(NamedTuple):
    """The fields of a `Sample` that a trainer's summary has too."""

    cpu_percent: Optional[float] = None
    rss_bytes: Optional[float] = None
    network_received_bytes_per_s: Optional[float] = None
    network_sent_bytes_per_s: Optional[float] = None
    read_bytes_per_s: Optional[float] = None
    written_bytes_per_s: Optional[float] = None
    gpu_percent: Optional[float] = None
    gpu_memory_bytes: Optional[float] = None
    gpu_power_w: Optional[float] = None
    gpu_temperature_c: Optional[float] = None


class Sample(NamedTuple):
    """The load of one node at one time. Rates are those since the sample before. None: not measured."""

    time_s: float
    """Seconds since `started_at`."""
    cpu_percent: Optional[float] = None
    """CPU time of the job on this node, relative to the cores that its ranks may run on: of the job's control group;
    without one, of the job's processes (with a trainer's ``--monitor``, of its ranks alone)."""
    rss_bytes: Optional[float] = None
    """Memory of the same processes on this node; `memory_source` says how it was counted."""
    network_received_bytes_per_s: Optional[float] = None
    """All interfaces of the node, loopback too."""
    network_sent_bytes_per_s: Optional[float] = None
    """The same."""
    read_bytes_per_s: Optional[float] = None
    """Storage, by the job's processes; with a trainer's ``--monitor``, by the node's ranks."""
    written_bytes_per_s: Optional[float] = None
    """The same."""
    gpu_percent: Optional[float] = None
    """Mean utilisation of the ranks' GPUs."""
    gpu_memory_bytes: Optional[float] = None
    """The ranks' GPUs in sum; null where one does not answer."""
    gpu_power_w: Optional[float] = None
    """The same."""
    gpu_temperature_c: Optional[float] = None
    """The hottest of the ranks' GPUs."""
    cores: Optional[int] = None
    """Cores that the ranks may run on."""
    memory_source: Optional[str] = None
    """Source of `rss_bytes`: ``cgroup``, ``pss`` (shared pages once) or ``rss`` (shared pages once per process)."""
    memory_limit_bytes: Optional[float] = None
    """The job's memory limit on the node; without one, the requested memory (not with a trainer's ``--monitor``)."""
    gpus: Optional[int] = None
    """GPUs that the job holds on the node; with a trainer's ``--monitor``, NVIDIA's of its ranks."""
    busy_percent: Optional[float] = None
    """Mean of the last minute: of the GPUs, of the cores without GPUs."""
    idle_s: Optional[float] = None
    """How long they have been below 5 %."""
    ranks: Optional[int] = None
    """Ranks that are alive."""
    ended_ranks: Optional[List[int]] = None
    """Ranks that ran before and have ended."""
    ended_s: Optional[float] = None
    """Seconds since the first of them ended."""


class End(NamedTuple):
    """The last line of a sampler that has ended."""


def decode_head(line: bytes) -> Optional[Head]:
    """The first line; None: another line, one that is cut short, or one of impossible numbers."""
    head = decode_kind(line, "monitor", Head)
    return head if head is not None and _is_possible(head) else None


def decode_sample(line: bytes) -> Optional[Sample]:
    """A sample; None: another line, one that is cut short, or one of impossible numbers."""
    sample = decode_kind(line, "sample", Sample)
    return sample if sample is not None and _is_possible(sample) else None


def _is_possible(line: Iterable[Any]) -> bool:
    """Whether no number is NaN, infinite, or more than any clock, memory or network has: sums of them are none then."""
    numbers = [value for field in line for value in (field if isinstance(field, list) else (field,))]
    return all(abs(value) < IMPOSSIBLE for value in numbers if isinstance(value, (int, float)))


def is_end(line: bytes) -> bool:
    """Whether the sampler that wrote this line has ended."""
    return decode_kind(line, "end", End) is not None


def encode_head(head: Head) -> str:
    """The first line, without its end."""
    return json.dumps({"kind": "monitor", **head._asdict()})


def encode_sample(time_s: float, values: Mapping[str, Any]) -> str:
    """A line with these values of a `Sample`, without its end."""
    return json.dumps({"kind": "sample", "time_s": round(time_s, 3), **values})


END_LINE = json.dumps({"kind": "end"})


def find_files(folder: AnyPath) -> List[str]:
    """Paths of the files in ``folder``, by the number of the node."""
    names = {name: match for name in os.listdir(folder) for match in [_NAME.match(name)] if match}
    return [os.path.join(os.fspath(folder), name) for name in sorted(names, key=lambda name: int(names[name][1] or 0))]
