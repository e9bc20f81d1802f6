"""Train with torch's DistributedDataParallel: every rank holds the whole model, gradients are
averaged by all-reduce in buckets while the backward pass still runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcjobs.trainers.config import flag, positive
from hpcjobs.trainers.launch import launch


@dataclass(frozen=True)
class DdpFlags:
    """The flags of PyTorch's DistributedDataParallel."""

    bucket_cap_mb: float = flag(25.0, "gradients per all-reduce, in MiB", parse=positive(float))
    gradient_as_bucket_view: bool = flag(True, "gradients live in the buckets: one copy less")
    compress: str = flag(
        "none", "compression of gradients for the all-reduce", choices=("none", "bf16", "fp16", "powersgd")
    )
    static_graph: bool = flag(False, "the graph never changes: allows more overlap")
    find_unused_parameters: bool = flag(False, "some weights get no gradient in some steps: look which")
    comm: str = flag(
        "group",
        "what sums gradients: torch's process group, or MPI where ranks have cores of their own",
        choices=("group", "mpi"),
    )
    broadcast_buffers: bool = flag(True, "rank 0's buffers (BatchNorm statistics) go to all each step")


def main(argv: Sequence[str] | None = None) -> int:
    return launch("ddp", __doc__, DdpFlags, argv, strategy="hpcjobs.trainers.strategies.ddp:make_ddp")


if __name__ == "__main__":
    sys.exit(main())
