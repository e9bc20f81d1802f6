"""A run whose loop, precision, accumulation and gradient synchronisation are Lightning's.

The world has met before Lightning starts, so it finds a process group and keeps it. Model, optimizer, rate, samples,
clipping,
metrics and checkpoints are those of every other trainer.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Literal

import torch

from hpcjobs.runtime.exits import UsageError
from hpcjobs.runtime.summary import Quantiles, RunSummary
from hpcjobs.trainers.core.checkpoints import Checkpoints, take_up
from hpcjobs.trainers.core.config import Config
from hpcjobs.trainers.core.data import EpochOrder, Loader
from hpcjobs.trainers.core.evaluate import evaluate
from hpcjobs.trainers.core.group import Group, joined
from hpcjobs.trainers.core.launch import Call
from hpcjobs.trainers.core.monitor import Monitor
from hpcjobs.trainers.core.plan import Plan, plan_training
from hpcjobs.trainers.core.record import Recorder
from hpcjobs.trainers.core.stage import staged
from hpcjobs.trainers.core.step import Stepper
from hpcjobs.trainers.core.train import closing, introduce, opening, refuse_unequal_data, set_numerics, settle_run_dir
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.lightning import LightningFlags
from hpcjobs.trainers.strategies.base import Strategy
from hpcjobs.trainers.strategies.fsdp import Fsdp
from hpcjobs.trainers.workloads import load_workload
from hpcjobs.trainers.workloads.base import Batch, Workload

try:
    from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
except ImportError as error:
    raise UsageError("the trainer lightning needs the package lightning", hint="pip install lightning") from error

MIXED: dict[str, Literal["bf16-mixed", "16-mixed"]] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


class Whole(Strategy):
    """The model is whole on every rank; Lightning's strategy averages the gradients."""

    def __init__(self, name: str) -> None:
        self.name = name


def spread(flags: LightningFlags) -> Strategy:
    return Fsdp(FsdpFlags()) if flags.strategy == "fsdp" else Whole(flags.strategy)


def train(call: Call[LightningFlags], strategy: Strategy) -> RunSummary:
    """As core.train.train, with Lightning's loop in the place of ours."""
    config = call.config
    with joined(call.env, device=config.device, timeout_s=config.rendezvous_timeout_s) as group:
        introduce(group)
        set_numerics(config)
        workload = load_workload(staged(config, group))
        refuse_unequal_data(group, workload)
        plan = plan_training(config, workload, group.world_size)
        run_dir = settle_run_dir(call, group)
        stepper = Stepper(config, workload, strategy, group=group, plan=plan)
        group.say(opening(call.trainer, workload, plan, stepper, run_dir))
        resumed = take_up(config, stepper, run_dir, plan=plan, group=group)
        with (
            Recorder(group, plan, workload, run_dir, resumed=resumed) as recorder,
            Checkpoints(config, run_dir, stepper, recorder, plan=plan, group=group) as checkpoints,
            Monitor(group, run_dir, on=config.monitor) as monitor,
        ):
            course = Course(config, stepper, recorder, checkpoints, group, step=0 if resumed is None else resumed.step)
            if course.step < plan.total_steps:
                strategy.backend = fit(config, call.flags, stepper, course, plan=plan, group=group)
            checkpoints.finish()
            summary = recorder.finish(
                steps=plan.total_steps,
                resumed_from_step=None if resumed is None else resumed.step,
                checkpoint_stall_s=Quantiles.of(checkpoints.stall_s),
                trainer=call.trainer,
                strategy=strategy.name,
                monitor=monitor.summary(),
                backend=strategy.backend or group.backend,
                job_id=os.environ.get("HPCJOBS_JOB_ID"),
                precision=config.precision,
                tf32=config.tf32,
                parameters=stepper.parameters,
                config={**asdict(config), **asdict(call.flags)},
            )
        group.say(closing(summary, run_dir))
    return summary


def fit(
    config: Config, flags: LightningFlags, stepper: Stepper, course: Course, *, plan: Plan, group: Group
) -> str | None:
    """One Trainer, one call of `fit`; Lightning's own logs, bars and checkpoints are off: ours are on.

    Gives what carried the gradients, where it was not the process group.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for other set-ups
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        trainer = Trainer(
            accelerator="gpu" if group.device.type == "cuda" else "cpu",
            devices=group.env.local_world_size,
            num_nodes=len(set(group.hosts)),
            strategy=lightning_strategy(flags, group, timeout_s=config.rendezvous_timeout_s),
            plugins=precision_plugins(config, stepper, group),
            max_epochs=-1,
            max_steps=plan.total_steps - course.step,
            accumulate_grad_batches=plan.accumulate,
            gradient_clip_val=config.clip_norm,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            callbacks=[course],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(stepper, course))
    carrier: str | None = getattr(trainer.strategy, "backend", None)
    return carrier


def lightning_strategy(flags: LightningFlags, group: Group, *, timeout_s: float) -> ParallelStrategy:
    if flags.strategy == "horovod":
        from hpcjobs.trainers.strategies.lightning_horovod import HorovodStrategy  # Horovod may not be there

        return HorovodStrategy(group=group)
    environment = place(group)
    if flags.strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=group.world_size, tensor_parallel_size=1)
        strategy.cluster_environment = environment
        return strategy
    return DDPStrategy(
        cluster_environment=environment, gradient_as_bucket_view=True, timeout=timedelta(seconds=timeout_s)
    )


def precision_plugins(config: Config, stepper: Stepper, group: Group) -> list[Any]:
    """Autocast where the strategy leaves it to the loop; the loss scale is the one that checkpoints keep."""
    if stepper.dtype is None:
        return []
    scaler = stepper.scaler if config.precision == "fp16" else None
    return [MixedPrecision(MIXED[config.precision], group.device.type, scaler)]


def place(group: Group) -> ClusterEnvironment:
    """Lightning's own reading of Slurm where srun started exactly this world, else ours: torchrun, mpirun, by hand."""
    env, said = group.env, os.environ
    expected = {
        "SLURM_STEP_NUM_TASKS": env.world_size,
        "SLURM_NTASKS": env.world_size,
        "SLURM_NTASKS_PER_NODE": env.local_world_size,
        "SLURM_NNODES": len(set(group.hosts)),
        "SLURM_PROCID": env.rank,
        "SLURM_LOCALID": env.local_rank,
    }
    if "TORCHELASTIC_RUN_ID" not in said and all(said.get(key) == str(value) for key, value in expected.items()):
        return SLURMEnvironment(auto_requeue=False)
    return Place(group)


class Place(ClusterEnvironment):
    """A rank as our own environment reading found it."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._env = group.env

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._env.master_addr

    @property
    def main_port(self) -> int:
        return self._env.master_port or 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._env.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has settled it."""

    def global_rank(self) -> int:
        return self._env.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has settled it."""

    def local_rank(self) -> int:
        return self._env.local_rank

    def node_rank(self) -> int:
        return self._env.node_rank


class Module(LightningModule):
    """The workload's loss of the stepper's model, stepped by the stepper's optimizer."""

    def __init__(self, stepper: Stepper, course: Course) -> None:
        super().__init__()
        self.model = stepper.model
        self._stepper, self._course = stepper, course

    def configure_model(self) -> None:
        """Sharded already, where it is: ModelParallelStrategy asks that this method be there."""

    def training_step(self, batch: Batch, number: int) -> torch.Tensor:
        return self._stepper.workload.loss(self._stepper.forward, batch)

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
            stepper.strategy.clip(stepper.strategy.parameters(stepper.model), gradient_clip_val)

    def train_dataloader(self) -> Batches:
        return self._course.batches()


class Batches:
    """One epoch's forward passes from any step on; Lightning counts several to an optimizer step."""

    def __init__(self, course: Course, order: EpochOrder) -> None:
        self._course, self._order = course, order

    def __len__(self) -> int:
        order, size = self._order, self._course.plan.batch_size
        left = -(-order.count // order.world_size) - order.first_step * order.samples_per_step
        whole, rest = divmod(left, order.samples_per_step)
        return whole * self._course.plan.accumulate + -(-rest // size)

    def __iter__(self) -> Iterator[Batch]:
        meter, size = self._course.recorder.meter, self._course.plan.batch_size
        batches = self._course.loader.epoch(self._order)
        for _ in range(len(self._order)):
            meter.begin()
            batch = next(batches)
            meter.data_ready()
            for start in range(0, len(batch[0]), size):
                yield tuple(part[start : start + size] for part in batch)


class Course(Callback):
    """What our loop does around a step: the rate, the line of metrics, the held-out part, the checkpoint."""

    def __init__(
        self,
        config: Config,
        stepper: Stepper,
        recorder: Recorder,
        checkpoints: Checkpoints,
        group: Group,
        *,
        step: int,
    ) -> None:
        self.config, self.stepper, self.recorder, self.checkpoints = config, stepper, recorder, checkpoints
        self.group, self.step, self.plan = group, step, stepper.plan
        self.workload: Workload = stepper.workload
        self.loader = Loader(self.workload.train, device=group.device, workers=config.workers)
        self._loss = torch.zeros((), device=group.device)

    @property
    def epoch(self) -> int:
        return self.step // self.plan.steps_per_epoch

    def batches(self) -> Batches:
        order = EpochOrder(
            len(self.workload.train),
            self.group.rank,
            self.group.world_size,
            self.plan.samples_per_step,
            self.config.seed,
            self.epoch,
            first_step=self.step % self.plan.steps_per_epoch,
        )
        return Batches(self, order)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for settings in self.stepper.optimizer.param_groups:
            settings["lr"] = self.plan.lr_at(self.step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loss += outputs["loss"].detach()
        if trainer.fit_loop._should_accumulate():
            return
        epoch = self.epoch
        self.recorder.meter.end()
        self.recorder.add(self._loss)
        self._loss = torch.zeros_like(self._loss)
        self.step += 1
        due = self.checkpoints.due(self.step)
        if self.step % self.config.log_every == 0 or due:
            self.recorder.flush(self.step, epoch)
        if due:
            self.checkpoints.save(self.step, epoch)
        if self.step % self.plan.steps_per_epoch == 0 or self.step == self.plan.total_steps:
            self._evaluate(epoch)

    def _evaluate(self, epoch: int) -> None:
        self.recorder.flush(self.step, epoch)
        held_out = self.workload.held_out
        if held_out is not None:
            result = evaluate(
                self.stepper.forward, self.workload, held_out, group=self.group, batch_size=self.plan.batch_size
            )
            self.recorder.evaluated(result, self.step, epoch)
