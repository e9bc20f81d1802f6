"""Chooses how many loader processes a rank gets where `--workers` does not say."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import replace
from typing import Any, cast

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.data.datasets import Stream
from hpcjobs.trainers.distributed.cpu_affinity import count_cores_per_rank
from hpcjobs.trainers.distributed.process_group import RankGroup

MOST_WORKERS = 8  # more rarely read faster than one GPU trains, and each has its own memory


def choose_workers(dataset: Any, *, device_type: str, cores: int) -> tuple[int, str]:
    """The number of loader processes of a rank with so many cores, and why."""
    if device_type == "cpu":
        return 0, "the CPU trains, and processes that read would take cores from it"
    if hasattr(dataset, "on_device"):
        return 0, "the data is made on the GPU"
    if isinstance(dataset, Stream):
        return min(1, cores - 1), "each process would read the whole stream"
    return min(MOST_WORKERS, cores - 1), f"cores per rank: {cores}"


def resolve_workers(config: Config, dataset: Any, group: RankGroup) -> Config:
    """The flags with a number of workers, which is printed where it was not given; a collective call."""
    if config.workers is not None:
        return config
    allowed = cast(list[Set[int]], group.gather(os.sched_getaffinity(0)))
    cores = max(1, count_cores_per_rank(group.hosts, allowed))
    workers, why = choose_workers(dataset, device_type=group.device.type, cores=cores)
    group.log(f"loader workers per rank: {workers} ({why})")
    return replace(config, workers=workers)
