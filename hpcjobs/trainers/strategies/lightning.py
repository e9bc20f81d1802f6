"""A run whose loop, precision, accumulation and gradient synchronisation are Lightning's.

The world has met before Lightning starts, so it finds a process group and keeps it. Model, optimizer, rate,
samples, clipping, metrics and checkpoints are those of every other trainer.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

from hpcjobs.runtime.exits import UsageError
from hpcjobs.runtime.summary import RunSummary
from hpcjobs.trainers.commandline.launch import Call
from hpcjobs.trainers.distributed.process_group import Group
from hpcjobs.trainers.fsdp import FsdpFlags
from hpcjobs.trainers.lightning import LightningFlags
from hpcjobs.trainers.loop.run import Run, opened
from hpcjobs.trainers.strategies.base import Strategy
from hpcjobs.trainers.strategies.fsdp import Fsdp

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy

    from hpcjobs.trainers.strategies.lightning_course import Course, Module, OwnSignals
    from hpcjobs.trainers.strategies.lightning_place import place
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
    """As loop.train.train, with Lightning's loop in the place of ours."""
    with opened(call, strategy) as run:
        run.evaluate_resumed()
        if run.first_step < run.plan.total_steps:
            strategy.backend = fit(run, call.flags)
        return run.finish(exposed_s=[], compute_s=[])


def fit(run: Run, flags: LightningFlags) -> str | None:
    """One Trainer, one call of `fit`; Lightning's own logs, bars and checkpoints are off: ours are on.

    Gives what carried the gradients, where it was not the process group.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    course = Course(run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="lightning")  # advice for other set-ups
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        trainer = Trainer(
            accelerator="gpu" if run.group.device.type == "cuda" else "cpu",
            devices=run.group.env.local_world_size,
            num_nodes=len(set(run.group.hosts)),
            strategy=lightning_strategy(flags, run.group, timeout_s=run.config.rendezvous_timeout_s),
            plugins=precision_plugins(run),
            max_epochs=-1,
            max_steps=run.plan.total_steps - run.first_step,
            accumulate_grad_batches=run.plan.accumulate,
            gradient_clip_val=run.config.clip_norm,
            reload_dataloaders_every_n_epochs=1,
            use_distributed_sampler=False,
            callbacks=[course, OwnSignals()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(run.stepper, course))
    carrier: str | None = getattr(trainer.strategy, "backend", None)
    return carrier


def lightning_strategy(flags: LightningFlags, group: Group, *, timeout_s: float) -> ParallelStrategy:
    if flags.strategy == "horovod":
        from hpcjobs.trainers.strategies.lightning_horovod import HorovodStrategy  # Horovod may not be there

        return HorovodStrategy(group=group)
    environment = place(group)
    group.say(f"Lightning's environment: {type(environment).__name__}")
    if flags.strategy == "fsdp":
        strategy = ModelParallelStrategy(data_parallel_size=group.world_size, tensor_parallel_size=1)
        strategy.cluster_environment = environment
        return strategy
    return DDPStrategy(
        cluster_environment=environment, gradient_as_bucket_view=True, timeout=timedelta(seconds=timeout_s)
    )


class ScaledLoss(MixedPrecision):
    """Scales the loss for a strategy that computes in fp16 by itself: there is nothing to autocast."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()


def precision_plugins(run: Run) -> list[Any]:
    """Autocast where the strategy leaves it to the loop; the loss scale is the one that checkpoints keep."""
    scaler = run.stepper.scaler if run.config.precision == "fp16" else None
    if run.stepper.dtype is not None:
        return [MixedPrecision(MIXED[run.config.precision], run.group.device.type, scaler)]
    return [] if scaler is None else [ScaledLoss(MIXED["fp16"], run.group.device.type, scaler)]
