"""Train with torch's fully_shard (FSDP2): every rank holds a part of each block's weights, gradients
and optimizer state; whole blocks exist only while they compute."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcjobs.trainers.config import flag, positive
from hpcjobs.trainers.launch import launch


@dataclass(frozen=True)
class FsdpFlags:
    """The flags of PyTorch's fully sharded data parallelism (FSDP2)."""

    reshard_after_forward: bool = flag(True, "drop whole weights after the forward pass: less memory")
    shard_size: int | None = flag(
        None, "shard over so many ranks and replicate over the rest", parse=positive(int), metavar="N"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return launch("fsdp", __doc__, FsdpFlags, argv, strategy="hpcjobs.trainers.strategies.fsdp:Fsdp")


if __name__ == "__main__":
    sys.exit(main())
