"""A training step of the language model with gradients by Horovod and by MPI, against ddp: tokens a second.

mpirun -np 2 python benchmarks/gradients.py    (or srun --mpi=pmix, on several hosts)

With the step of one rank alone, at the same time on all ranks, as the bound: what is above it is communication.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import harness
import torch
from harness import compete, parse_no_arguments, report

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.distributed import RankGroup, join_world
from hpcjobs.trainers.horovod import HorovodFlags
from hpcjobs.trainers.optimization import Stepper, plan_training
from hpcjobs.trainers.strategies import Strategy
from hpcjobs.trainers.strategies.ddp import Ddp, DdpOverMpi
from hpcjobs.trainers.workloads.lm import lm

ROUNDS = int(os.environ.get("ROUNDS", "25"))
STEPS = 4
BATCHES = [int(size) for size in os.environ.get("BATCHES", "1 8").split()]


class Alone(Strategy):
    """No gradients travel: the step itself."""


def step_ms(strategy: Strategy, batch_size: int, group: RankGroup) -> Callable[[], float]:
    config = Config(workload="lm", preset="small", sequence_length=64, batch_size=batch_size, steps=10_000)
    workload = lm(config)
    batch = workload.train.read_batch(range(batch_size))
    stepper = Stepper(config, workload, strategy, group=group, plan=plan_training(config, workload, group.world_size))

    def window() -> float:
        group.barrier()
        began = time.perf_counter()
        for step in range(STEPS):
            stepper.step(batch, step)
        own_ms = (time.perf_counter() - began) / STEPS * 1e3
        return float(group.max(torch.tensor(own_ms)))

    for _ in range(4):
        window()  # threads and buckets
    return window


def main() -> None:
    parse_no_arguments(__doc__)
    env = DistEnv.from_environ(os.environ)
    if env.world_size == 1:
        print("not run: it needs ranks: mpirun -np 2 python benchmarks/gradients.py")
        return
    with join_world(env, device="cpu", timeout_s=60) as group:
        if group.rank != 0:
            harness.RESULTS = Path(mkdtemp())  # the first rank's samples are the ones kept
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        # Horovod comes second: its thread wakes each millisecond, and whoever waits by spinning would pay for it.
        others = {"horovod": horovod} if find_spec("horovod") is not None else {}
        for name, strategy in {"ddp --comm mpi": lambda: DdpOverMpi(DdpFlags(comm="mpi")), **others}.items():
            for batch_size in BATCHES:
                against_ddp(name, strategy(), batch_size, group)


def horovod() -> Strategy:
    from hpcjobs.trainers.strategies.horovod import Horovod

    return Horovod(HorovodFlags())


def against_ddp(name: str, strategy: Strategy, batch_size: int, group: RankGroup) -> None:
    contestants = {
        "ddp": step_ms(Ddp(DdpFlags()), batch_size, group),
        "no communication": step_ms(Alone(), batch_size, group),
        name: step_ms(strategy, batch_size, group),
    }
    outcome = compete("ddp", contestants, rounds=ROUNDS, name=f"{name.split()[-1]}-{batch_size}")
    ranks = f"{group.world_size} ranks on {len(set(group.hosts))} hosts"
    report(f"One step of lm, 4.2 M parameters, batch {batch_size} × 64, {ranks}", outcome, unit="ms")
    bound = {line.name: line.median for line in outcome.lines}["no communication"]
    for line in outcome.lines:
        rate = batch_size * 64 * group.world_size / line.median * 1e3
        print(f"  {line.name:18} {rate:10,.0f} tokens/s, communication {line.median / bound - 1:+.0%}")


if __name__ == "__main__":
    main()
