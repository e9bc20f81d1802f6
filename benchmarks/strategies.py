"""What does a step cost under each strategy, against a hand-written loop over torch's own classes?

torchrun --nproc-per-node 2 benchmarks/strategies.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import harness
import torch
from harness import compete, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.core.config import Config
from hpcjobs.trainers.core.group import Group, joined
from hpcjobs.trainers.core.plan import plan_training
from hpcjobs.trainers.core.record import Recorder
from hpcjobs.trainers.core.step import Stepper
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.ddp_scratch import DdpScratchFlags
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.fsdp_scratch import FsdpScratchFlags
from hpcjobs.trainers.strategies.base import Strategy
from hpcjobs.trainers.strategies.ddp import Ddp
from hpcjobs.trainers.strategies.ddp_scratch import DdpScratch
from hpcjobs.trainers.strategies.fsdp import Fsdp
from hpcjobs.trainers.strategies.fsdp_scratch import FsdpScratch
from hpcjobs.trainers.workloads.base import Batch, Workload
from hpcjobs.trainers.workloads.lm import lm

STEPS = 5
CONFIG = Config(workload="lm", preset="small", sequence_length=64, batch_size=8, steps=10_000)


def ours(strategy: Strategy, workload: Workload, batch: Batch, group: Group) -> Callable[[], float]:
    """The trainer's own step, with its metering and one line of metrics per window."""
    plan = plan_training(CONFIG, workload, group.world_size)
    stepper = Stepper(CONFIG, workload, strategy, group=group, plan=plan)
    recorder = Recorder(group, plan, workload, Path(mkdtemp()), resumed=None)

    def window() -> float:
        group.barrier()
        began = time.perf_counter()
        for step in range(STEPS):
            recorder.meter.begin()
            recorder.meter.data_ready()
            loss = stepper.step(batch, step)
            recorder.meter.end()
            recorder.add(loss)
        recorder.flush(STEPS, 0)
        return (time.perf_counter() - began) / STEPS * 1e3

    return window


def by_hand(workload: Workload, batch: Batch, group: Group) -> Callable[[], float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.build_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    inputs, targets = batch

    def window() -> float:
        group.barrier()
        began = time.perf_counter()
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return (time.perf_counter() - began) / STEPS * 1e3

    return window


def main() -> int:
    with joined(DistEnv.from_environ(os.environ), device="cpu", timeout_s=60) as group:
        workload = lm(CONFIG)
        batch = workload.train[range(8)]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  progress lines are not the benchmark's
        whole = {
            "plain DDP by hand": by_hand(workload, batch, group),
            "ddp": ours(Ddp(DdpFlags()), workload, batch, group),
            "ddp_scratch": ours(DdpScratch(DdpScratchFlags()), workload, batch, group),
        }
        sharded = {
            "fsdp": ours(Fsdp(FsdpFlags()), workload, batch, group),
            "fsdp_scratch": ours(FsdpScratch(FsdpScratchFlags()), workload, batch, group),
        }
        if group.rank != 0:
            harness.RESULTS = Path(mkdtemp())  # the first rank's samples are the ones kept
        outcomes = [
            (f"one step on {group.world_size} ranks", compete("plain DDP by hand", whole)),
            (f"one sharded step on {group.world_size} ranks", compete("fsdp", sharded)),
        ]
        sys.stdout = sys.__stdout__
        if group.rank == 0:
            for title, outcome in outcomes:
                report(title, outcome, unit="ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
