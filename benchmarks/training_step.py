"""What does a training step cost: by hand over plain DDP, by our trainers, by Accelerate and by Lightning?

python benchmarks/training_step.py    starts itself on two ranks for a real step, and alone for the tax on an empty one
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import harness
import torch
from harness import Contestant, Outcome, compete, parse_no_arguments, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcjobs.node.monitor import GpuReader, JobGroup, JobProcesses, NodeSampler
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.ddp import DdpFlags
from hpcjobs.trainers.ddp_scratch import DdpScratchFlags
from hpcjobs.trainers.distributed import RankGroup, join_world
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.fsdp_scratch import FsdpScratchFlags
from hpcjobs.trainers.metrics import INTERVAL_S, Recorder
from hpcjobs.trainers.optimization import Stepper, plan_training
from hpcjobs.trainers.profiler import Probe
from hpcjobs.trainers.strategies import Strategy
from hpcjobs.trainers.strategies.ddp import Ddp
from hpcjobs.trainers.strategies.ddp_scratch import DdpScratch
from hpcjobs.trainers.strategies.fsdp import Fsdp
from hpcjobs.trainers.strategies.fsdp_scratch import FsdpScratch
from hpcjobs.trainers.workloads.base import Batch, Workload, classification_loss, classification_score
from hpcjobs.trainers.workloads.lm import lm

REAL = Config(workload="lm", preset="small", sequence_length=64, batch_size=8, steps=10_000)
EMPTY = Config(workload="empty", batch_size=8, steps=10_000)
ROUNDS = int(os.environ.get("ROUNDS", "25"))
PROBE_EVERY = Config().probe_every


class Points:
    """Nearly nothing to compute: what is left of a step is what the loop around it costs."""

    def __len__(self) -> int:
        return 1 << 20

    def read_batch(self, indices: Any) -> Batch:
        return torch.ones(len(indices), 16), torch.zeros(len(indices), dtype=torch.int64)


class Repeated:
    """As Lightning takes a loader; a list would be several loaders."""

    def __init__(self, batch: Batch, count: int) -> None:
        self.batch, self.count = batch, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        return repeat(self.batch, self.count)


def empty() -> Workload:
    return Workload(
        name="empty", unit="points", units_per_sample=1, flops_per_sample=1.0, build_model=lambda: nn.Linear(16, 16),
        loss=classification_loss, evaluate=classification_score, train=Points(), held_out=None, batch_size=8, lr=1e-3,
        weight_decay=0.01,
    )  # fmt: skip


def time_steps(
    group: RankGroup, steps: int, step: Callable[[int], None], after: Callable[[], None] = lambda: None
) -> float:
    """Milliseconds per step, from a common start of all ranks."""
    group.barrier()
    began = time.perf_counter()
    for number in range(steps):
        step(number)
    after()
    return (time.perf_counter() - began) / steps * 1e3


def time_trainer(
    config: Config, strategy: Strategy, workload: Workload, batch: Batch, group: RankGroup, steps: int
) -> Contestant:
    """The trainer's own step, with its metering and one line of metrics per window."""
    plan = plan_training(config, workload, group.world_size)
    stepper = Stepper(config, workload, strategy, group=group, plan=plan)
    recorder = Recorder(group, plan, workload, Path(mkdtemp()), resumed=None)

    def step(number: int) -> None:
        recorder.meter.begin()
        recorder.meter.data_ready()
        loss = stepper.step(batch, number)
        recorder.meter.end()
        recorder.add(loss)

    return lambda: time_steps(group, steps, step, lambda: recorder.flush(steps, 0))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


def by_hand(workload: Workload, batch: Batch, group: RankGroup, steps: int) -> Contestant:
    torch.manual_seed(0)
    model = DistributedDataParallel(workload.build_model(), gradient_as_bucket_view=True)
    optimizer = adamw(model)

    def step(number: int) -> None:
        classification_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: time_steps(group, steps, step)


def by_accelerate(workload: Workload, batch: Batch, group: RankGroup, steps: int) -> Contestant:
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True), workload.build_model()
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(number: int) -> None:
        accelerator.backward(classification_loss(model, batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return lambda: time_steps(group, steps, step)


def by_lightning(workload: Workload, batch: Batch, group: RankGroup, steps: int) -> Contestant:
    """Its own loop and strategy; without logger, bar and checkpoints. Setting up a fit is not counted."""
    import logging
    import warnings

    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from hpcjobs.trainers.strategies.lightning import LauncherEnvironment

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.build_model()

        def training_step(self, batch: Batch, number: int) -> torch.Tensor:
            return classification_loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.model)

    class Clock(Callback):
        began = took = 0.0

        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, number: int) -> None:
            if number == 2:
                group.barrier()
                self.began = time.perf_counter()

        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.took = time.perf_counter() - self.began

    def window() -> float:
        clock = Clock()
        trainer = Trainer(
            accelerator="cpu", devices=group.env.local_world_size, max_steps=steps + 2, callbacks=[clock], logger=False,
            strategy=DDPStrategy(cluster_environment=LauncherEnvironment(group.env), gradient_as_bucket_view=True),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), Repeated(batch, steps + 2))
        return clock.took / steps * 1e3

    return window


def peers(workload: Workload, batch: Batch, group: RankGroup, steps: int) -> dict[str, Contestant]:
    kinds = {"accelerate": by_accelerate, "lightning": by_lightning}
    there = {name: kind for name, kind in kinds.items() if find_spec(name) is not None}
    return {name.capitalize(): kind(workload, batch, group, steps) for name, kind in there.items()}


def real(group: RankGroup) -> list[tuple[str, Outcome]]:
    workload, steps = lm(REAL), 5
    batch = workload.train.read_batch(range(8))
    contestants = {
        "plain DDP by hand": by_hand(workload, batch, group, steps),
        "ddp": time_trainer(REAL, Ddp(DdpFlags()), workload, batch, group, steps),
        "ddp_scratch": time_trainer(REAL, DdpScratch(DdpScratchFlags()), workload, batch, group, steps),
        **peers(workload, batch, group, steps),
    }
    sharded = {
        "fsdp": time_trainer(REAL, Fsdp(FsdpFlags()), workload, batch, group, steps),
        "fsdp_scratch": time_trainer(REAL, FsdpScratch(FsdpScratchFlags()), workload, batch, group, steps),
    }
    ranks = f"{group.world_size} ranks, 3.2 M parameters, batch 8 × 64 each"
    return [
        (f"a step on {ranks}", compete("plain DDP by hand", contestants, rounds=ROUNDS, name="whole")),
        (f"a sharded step on {ranks}", compete("fsdp", sharded, rounds=ROUNDS, name="sharded")),
    ]


def tax(group: RankGroup) -> list[tuple[str, Outcome]]:
    workload, steps = empty(), 200
    batch = workload.train.read_batch(range(8))
    contestants = {
        "plain DDP by hand": by_hand(workload, batch, group, steps),
        "ddp": time_trainer(EMPTY, Ddp(DdpFlags()), workload, batch, group, steps),
        **peers(workload, batch, group, steps),
    }
    return [("an empty step on one rank", compete("plain DDP by hand", contestants, rounds=ROUNDS, name="tax"))]


def extras(group: RankGroup) -> str:
    """What measuring costs, from its parts: a probe each so many steps, a sample of the monitor each second."""
    workload = lm(REAL)
    batch, plan = workload.train.read_batch(range(8)), plan_training(REAL, workload, group.world_size)
    stepper = Stepper(REAL, workload, Ddp(DdpFlags()), group=group, plan=plan)
    probe = Probe(PROBE_EVERY, stepper, group)
    sampler = NodeSampler(
        JobProcesses(ranks={os.getpid(): 0}), JobGroup(), GpuReader({"CUDA_VISIBLE_DEVICES": ""}, None)
    )
    step_ms = statistics.median(
        time_steps(group, 5, lambda number: void(stepper.step(batch, number))) for _ in range(11)
    )
    probe_ms = statistics.median(time_steps(group, 1, lambda number: probe.measure(batch)) for _ in range(11))
    began = time.process_time()
    for _ in range(50):
        sampler.sample()
    sample_s = (time.process_time() - began) / 50
    cores = len(os.sched_getaffinity(0))
    return (
        f"\nprobe: {probe_ms:.1f} ms each {PROBE_EVERY} steps of {step_ms:.1f} ms: "
        f"{probe_ms / step_ms / PROBE_EVERY:.2%} of the time\n"
        f"monitor: {1e3 * sample_s:.2f} ms of CPU each {INTERVAL_S:g} s: "
        f"{sample_s / INTERVAL_S / cores:.2%} of {cores} cores"
    )


def void(value: object) -> None:
    """A contestant's result is not wanted."""


@contextmanager
def quiet() -> Iterator[None]:
    """Progress lines are not the benchmark's."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield


def main() -> int:
    parse_no_arguments(__doc__)
    if "RANK" not in os.environ:
        here = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return max(subprocess.run([*here, str(ranks), __file__], env=env).returncode for ranks in (2, 1))
    with join_world(DistEnv.from_environ(os.environ), device="cpu", timeout_s=60) as group:
        if group.rank != 0:
            harness.RESULTS = Path(mkdtemp())  # the first rank's samples are the ones kept
        with quiet():
            outcomes = tax(group) if group.world_size == 1 else real(group)
            more = "" if group.world_size == 1 else extras(group)
        if group.rank == 0:
            for title, outcome in outcomes:
                report(title, outcome, unit="ms")
                base = outcome.lines[0].median
                if group.world_size == 1:
                    print("tax: " + ", ".join(f"{x.name} {1e3 * (x.median - base):+.0f} µs" for x in outcome.lines[1:]))
            print(more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
