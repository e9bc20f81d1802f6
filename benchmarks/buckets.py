"""How many all-reduces does a step of ResNet-50 make, by the size of DDP's buckets? Counts, the same everywhere."""

from __future__ import annotations

import os

import torch
from harness import machine, parse_no_arguments

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.distributed import RankGroup, join_world
from hpcjobs.trainers.strategies import Traffic
from hpcjobs.trainers.strategies.ddp import Ddp
from hpcjobs.trainers.workloads.resnet50 import resnet50

CAPS_MB = (1.0, 8.0, 25.0)
STEPS = 3  # DDP settles its buckets by the order in which gradients came in the first
CONFIG = Config(workload="resnet50", image_size=32, train_samples=8)


def traffic(group: RankGroup, *, bucket_cap_mb: float) -> tuple[Traffic, int]:
    """Of one step, and the number of parameters that have a gradient."""
    workload, strategy = resnet50(CONFIG), Ddp(DdpFlags(bucket_cap_mb=bucket_cap_mb))
    model = strategy.wrap(workload.build_model(), group=group, workload=workload, dtype=None)
    for _ in range(STEPS):
        loss = workload.loss(model, workload.train.read_batch(range(2)))
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    traffic_of_step = strategy.traffic(model)
    assert traffic_of_step is not None
    return traffic_of_step, len(list(model.parameters()))


def main() -> None:
    parse_no_arguments(__doc__)
    torch.manual_seed(0)
    with join_world(DistEnv.from_environ(os.environ), device="cpu", timeout_s=60) as group:
        print(f"all-reduces per step of ResNet-50\n{machine()}")
        tensors = None
        for cap in CAPS_MB:
            step, tensors = traffic(group, bucket_cap_mb=cap)
            assert step.calls is not None
            print(
                f"buckets of {cap:>4.0f} MiB  {step.calls:>4} calls of {step.bytes / 2**20 / step.calls:6.1f} MiB, "
                f"{tensors / step.calls:5.1f} times fewer than one per tensor"
            )
        print(f"one per tensor       {tensors:>4} calls")


if __name__ == "__main__":
    main()
