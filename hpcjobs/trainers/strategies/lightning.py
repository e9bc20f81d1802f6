"""Runs a training with Lightning's loop, precision, accumulation and gradient synchronisation.

The ranks have met before Lightning starts, so it finds a process group and keeps it. Model, optimizer, learning rate,
samples, clipping, metrics and checkpoints are the same as in every other trainer.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch

from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.data import TrainingData
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.launch import Call
from hpcjobs.trainers.lightning import LightningFlags
from hpcjobs.trainers.loop import TrainingRun, open_run
from hpcjobs.trainers.optimization import Stepper, set_learning_rate
from hpcjobs.trainers.strategies import Strategy
from hpcjobs.trainers.strategies.fsdp import Fsdp
from hpcjobs.trainers.workloads.base import Batch, count_samples, slice_batch

try:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
except ImportError as error:
    raise UsageError("the trainer lightning needs the package lightning", hint="pip install lightning") from error

MIXED: dict[str, Literal["bf16-mixed", "16-mixed"]] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def make_strategy(flags: LightningFlags) -> Strategy:
    strategy = Fsdp(FsdpFlags()) if flags.strategy == "fsdp" else Strategy()  # else Lightning averages the gradients
    strategy.name = flags.strategy
    return strategy


def train(call: Call[LightningFlags], strategy: Strategy) -> RunSummary:
    """Train as loop.run.train does, with Lightning's loop in place of ours."""
    with open_run(call, strategy) as run:
        run.evaluate_resumed()
        if run.first_step < run.plan.total_steps:
            strategy.backend = fit(run, call.flags)
        return run.finish(exposed_s=[], compute_s=[])


def fit(run: TrainingRun, flags: LightningFlags) -> str | None:
    """Run `fit` of one Trainer. Lightning's logs, progress bars and checkpoints are off; ours are on.

    Returns the library that carried the gradients, if it was not the process group's.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = TrainingCallback(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for other set-ups
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        trainer = Trainer(
            accelerator="gpu" if run.group.device.type == "cuda" else "cpu",
            devices="auto" if run.group.device.type == "cuda" else run.group.env.local_world_size,
            num_nodes=len(set(run.group.hosts)),
            strategy=make_lightning_strategy(flags, run.group, timeout_s=run.config.rendezvous_timeout_s),
            plugins=make_precision_plugins(run),
            max_epochs=-1,
            max_steps=run.plan.total_steps - run.first_step,
            accumulate_grad_batches=run.plan.accumulate,
            gradient_clip_val=run.stepper.clip_norm,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            callbacks=[callback, KeepSignalHandlers()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(WorkloadModule(run.stepper, callback))
    carrier: str | None = getattr(trainer.strategy, "backend", None)
    return carrier


def make_lightning_strategy(flags: LightningFlags, group: RankGroup, *, timeout_s: float) -> ParallelStrategy:
    strategy = choose_lightning_strategy(flags, group, timeout_s=timeout_s)
    if group.device.type == "cuda":
        # Devices of the host's ranks as this rank numbers them: Slurm may show it only one, but with the Trainer's
        # `devices=` every rank would have to see all.
        numbers = [rank % torch.cuda.device_count() for rank in range(group.env.local_world_size)]
        strategy.parallel_devices = [torch.device("cuda", number) for number in numbers]
    return strategy


def choose_lightning_strategy(flags: LightningFlags, group: RankGroup, *, timeout_s: float) -> ParallelStrategy:
    if flags.strategy == "horovod":
        from hpcjobs.trainers.strategies.lightning_horovod import HorovodStrategy  # Horovod may not be there

        return HorovodStrategy(group=group)
    environment = choose_environment(group)
    group.log(f"Lightning's environment: {type(environment).__name__}")
    if flags.strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=group.world_size, tensor_parallel_size=1)
        strategy.cluster_environment = environment
        return strategy
    return DDPStrategy(
        cluster_environment=environment, gradient_as_bucket_view=True, timeout=timedelta(seconds=timeout_s)
    )


def choose_environment(group: RankGroup) -> ClusterEnvironment:
    """Return SLURMEnvironment if srun started exactly this world; otherwise ours (torchrun, mpirun, by hand)."""
    env, variables = group.env, os.environ
    expected = {
        "SLURM_STEP_NUM_TASKS": env.world_size,
        "SLURM_NTASKS": env.world_size,
        "SLURM_NTASKS_PER_NODE": env.local_world_size,
        "SLURM_NNODES": len(set(group.hosts)),
        "SLURM_PROCID": env.rank,
        "SLURM_LOCALID": env.local_rank,
    }
    by_srun = all(variables.get(name) == str(value) for name, value in expected.items())
    if by_srun and "TORCHELASTIC_RUN_ID" not in variables:
        return SLURMEnvironment(auto_requeue=False)
    return LauncherEnvironment(group.env)


class LauncherEnvironment(ClusterEnvironment):
    """The world that a launcher started, as `DistEnv` read it. Lightning starts no process and changes no rank."""

    def __init__(self, env: DistEnv) -> None:
        super().__init__()
        self.env = env

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.env.master_addr

    @property
    def main_port(self) -> int:
        return self.env.master_port or 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.env.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return self.env.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return self.env.local_rank

    def node_rank(self) -> int:
        return self.env.node_rank


class ScaledLoss(MixedPrecision):
    """Scales the loss without autocast, for a strategy that computes in fp16 by itself."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()


def make_precision_plugins(run: TrainingRun) -> list[Any]:
    """Return plugins for autocast, unless the strategy does without, and for the loss scale that checkpoints save."""
    scaler = run.stepper.scaler if run.config.precision == "fp16" else None
    if run.stepper.dtype is not None:
        return [MixedPrecision(MIXED[run.config.precision], run.group.device.type, scaler)]
    return [] if scaler is None else [ScaledLoss(MIXED["fp16"], run.group.device.type, scaler)]


class WorkloadModule(LightningModule):
    """The workload's loss of the stepper's model, stepped by the stepper's optimizer."""

    def __init__(self, stepper: Stepper, callback: TrainingCallback) -> None:
        super().__init__()
        self.model = stepper.model
        self._stepper, self._callback = stepper, callback

    def configure_model(self) -> None:
        """Required by ModelParallelStrategy; `wrap` has sharded the model already."""

    def training_step(self, part: tuple[Batch, float], number: int) -> torch.Tensor:
        """Lightning divides by the number of passes of a full step; parts count by their share of their step."""
        batch, share = part
        return self._stepper.compute_loss(batch) * (share * self._stepper.plan.accumulate)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._stepper.optimizer

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """As in our own step: in mixed precision Lightning would refuse to clip for a fused optimizer."""
        if gradient_clip_val is not None:
            stepper = self._stepper
            stepper.scaler.unscale_(stepper.optimizer)
            stepper.clip(gradient_clip_val)

    def train_dataloader(self) -> Batches:
        return self._callback.batches()


class Batches:
    """One epoch's forward passes from any step on; Lightning counts several to an optimizer step."""

    def __init__(self, run: TrainingRun, data: TrainingData, epoch: int, first_step: int) -> None:
        self._run, self._data, self._epoch, self._first_step = run, data, epoch, first_step

    def __len__(self) -> int:
        plan = self._run.plan
        full_steps, rest = divmod(self._data.count_left(self._epoch, self._first_step), plan.samples_per_step)
        return full_steps * plan.accumulate + -(-rest // plan.batch_size)

    def __iter__(self) -> Iterator[tuple[Batch, float]]:
        """Yield each batch with its share of the step's samples."""
        meter, plan = self._run.recorder.meter, self._run.plan
        batches = self._data.epoch(self._epoch, self._first_step)
        for _ in range(plan.steps_per_epoch - self._first_step):
            meter.begin()
            batch = next(batches)
            meter.data_ready()
            total = count_samples(batch)
            for start in range(0, total, plan.batch_size):
                part = slice_batch(batch, start, start + plan.batch_size)
                yield part, count_samples(part) / total


class TrainingCallback(Callback):
    """Does the work of our loop around a step: learning rate, metrics, evaluation, checkpoint."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.step = run, run.first_step
        self._data = run.make_training_data()
        self._loss = torch.zeros((), device=run.group.device)

    @property
    def epoch(self) -> int:
        return self.run.plan.locate(self.step)[0]

    def batches(self) -> Batches:
        return Batches(self.run, self._data, *self.run.plan.locate(self.step))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        set_learning_rate(self.run.stepper.optimizer, self.run.plan.lr_at(self.step))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loss += outputs["loss"].detach()
        if trainer.fit_loop._should_accumulate():
            return
        epoch, recorder = self.epoch, self.run.recorder
        self.run.stepper.update_average()
        recorder.meter.end()
        recorder.add(self._loss, self.run.stepper.take_metrics())
        self._loss = torch.zeros_like(self._loss)
        self.step += 1
        self.run.end_step(self.step, epoch)


class KeepSignalHandlers(Callback):
    """Restores the signal handlers from before `fit`. Lightning's handler broadcasts to the other ranks from within the
    signal, while the interrupted step may be in another collective."""

    def __init__(self) -> None:
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
