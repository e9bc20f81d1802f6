"""``python -m hpcjobs.trainers.metrics.sweep``: time all-reduce by size, over torch's group, Horovod or MPI (mpi4py).

Every rank of a launch runs it, like a trainer; rank 0 writes the figures. The time of a round is measured on the
slowest rank, and the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import RendezvousError, TrainerError
from hpcjobs.trainers.commandline.launch import report
from hpcjobs.trainers.distributed.mpi import Mpi
from hpcjobs.trainers.distributed.process_group import RankGroup, join_world


def over_horovod(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by Horovod, started as in the trainer."""
    from hpcjobs.trainers.strategies.horovod import hvd, start

    name = start(group.env, group.hosts, controller="auto", share=group.from_first, log=lambda _: None)
    return name, lambda values: hvd.allreduce_(values, op=hvd.Sum, name="sweep")


def over_mpi(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by MPI.

    Raises:
        WorldMismatch: MPI cannot start on all ranks.
    """
    world = Mpi.of(group)
    return "mpi", world.sum


LEAST = 1 << 10
Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks, in place."""


def over_group(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by torch.distributed, with the backend of the device."""

    def reduce(values: torch.Tensor) -> None:
        dist.all_reduce(values)
        if values.is_cuda:
            torch.cuda.synchronize(values.device)

    return group.backend, reduce


OVER = {"group": over_group, "horovod": over_horovod, "mpi": over_mpi}


def list_sizes(most: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB … up to ``most`` bytes."""
    byte_counts = [LEAST]
    while byte_counts[-1] * 4 <= most:
        byte_counts.append(byte_counts[-1] * 4)
    return byte_counts


def measure(
    reduce: Reduce, group: RankGroup, size: int, *, rounds: int | None = None, expected: int | None = None
) -> float:
    """Seconds for one all-reduce of ``size`` bytes of fp32, on the slowest rank.

    Args:
        expected: the sum of ones [the world size].

    Raises:
        RendezvousError: the sum is wrong: not all ranks took part.
    """
    values = torch.ones(size // 4, device=group.device)
    worst = []
    for _ in range(1 + (rounds or (10 if size <= 1 << 20 else 4))):
        values.fill_(1.0)
        group.barrier()
        began = time.perf_counter()
        reduce(values)
        worst.append(float(group.max(torch.tensor([time.perf_counter() - began], dtype=torch.float64))))
    ranks = group.world_size if expected is None else expected
    if not bool((values == ranks).all()):
        raise RendezvousError(f"a sum over {ranks} ranks came out as {values[0].item():g}")
    return min(worst[1:])  # the first one opens connections


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__)
    parser.add_argument("--over", choices=list(OVER), default="group")
    parser.add_argument("--most", default="64M", help="largest size; K and M are understood [64M]")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(argv)
    try:
        with join_world(DistEnv.from_environ(os.environ), device="auto", timeout_s=60) as group:
            name, reduce = OVER[flags.over](group)
            byte_counts = list_sizes(_bytes(flags.most))
            points = [{"bytes": size, "seconds": measure(reduce, group, size)} for size in byte_counts]
    except TrainerError as error:
        return report(error)
    if group.rank == 0:
        for point in points:
            print(f"{name}: {point['bytes']:>11,.0f} bytes {1e6 * point['seconds']:10.1f} µs")
        if flags.json is not None:
            flags.json.write_text(json.dumps({"over": name, "world_size": group.world_size, "allreduce": points}))
    return 0


def _bytes(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * scale[text[-1]] if text[-1] in scale else int(text)


if __name__ == "__main__":
    sys.exit(main())
