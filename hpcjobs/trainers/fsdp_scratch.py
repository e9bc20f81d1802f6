"""Fully sharded training from torch.distributed's primitives alone, written to be read: flat
parameters, all-gather before use, reduce-scatter of gradients, an optimizer that sees only its part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcjobs.trainers.config import flag
from hpcjobs.trainers.launch import launch


@dataclass(frozen=True)
class FsdpScratchFlags:
    """The flags of sharded data parallelism by hand."""

    reshard_after_forward: bool = flag(True, "drop whole weights after the forward pass: less memory")


def main(argv: Sequence[str] | None = None) -> int:
    return launch(
        "fsdp_scratch", __doc__, FsdpScratchFlags, argv, strategy="hpcjobs.trainers.strategies.fsdp_scratch:FsdpScratch"
    )


if __name__ == "__main__":
    sys.exit(main())
