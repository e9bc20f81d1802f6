"""Train with Lightning's Trainer: the same model, samples and metrics, in a LightningModule."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcjobs.trainers.config import flag
from hpcjobs.trainers.launch import launch

HERE = "hpcjobs.trainers.strategies.lightning"


@dataclass(frozen=True)
class LightningFlags:
    """The flags of Lightning's Trainer."""

    strategy: str = flag(
        "ddp",
        "ddp: Lightning's DDPStrategy; fsdp: its ModelParallelStrategy with FSDP2; horovod: ours",
        choices=("ddp", "fsdp", "horovod"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    return launch("lightning", __doc__, LightningFlags, argv, strategy=f"{HERE}:make_strategy", train=f"{HERE}:train")


if __name__ == "__main__":
    sys.exit(main())
