"""Train with Horovod: every rank holds the whole model, gradients are averaged by fused all-reduces
over MPI or Gloo while the backward pass still runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hpcjobs.trainers.config import flag, positive
from hpcjobs.trainers.launch import launch


@dataclass(frozen=True)
class HorovodFlags:
    """The flags of Horovod."""

    compress: str = flag("none", "send gradients as they are, or as 16 bit floats", choices=("none", "fp16"))
    fusion_threshold_mb: float | None = flag(
        None, "gradients that travel together, in MiB; Horovod's own: 128", parse=positive(float)
    )
    cycle_time_ms: float | None = flag(
        None, "pause between two rounds of collectives; Horovod's own: 1", parse=positive(float)
    )
    adasum: bool = flag(False, "combine steps by their directions instead of averaging gradients; needs MPI")
    join: bool = flag(False, "no sample twice an epoch: a rank that runs out waits for the others")
    controller: str = flag("auto", "what ranks agree over; auto: MPI if the launcher speaks it, else Gloo",
                           choices=("auto", "mpi", "gloo"))  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return launch("horovod", __doc__, HorovodFlags, argv, strategy="hpcjobs.trainers.strategies.horovod:Horovod")


if __name__ == "__main__":
    sys.exit(main())
