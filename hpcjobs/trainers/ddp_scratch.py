"""Data parallel training from torch.distributed's primitives alone, written to be read: buckets,
gradient hooks, and all-reduces that overlap the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcjobs.trainers.config import flag, positive
from hpcjobs.trainers.launch import launch


@dataclass(frozen=True)
class DdpScratchFlags:
    """The flags of data parallelism by hand."""

    bucket_cap_mb: float = flag(25.0, "gradients per all-reduce, in MiB", parse=positive(float))


def main(argv: Sequence[str] | None = None) -> int:
    return launch(
        "ddp_scratch", __doc__, DdpScratchFlags, argv, strategy="hpcjobs.trainers.strategies.ddp_scratch:DdpScratch"
    )


if __name__ == "__main__":
    sys.exit(main())
