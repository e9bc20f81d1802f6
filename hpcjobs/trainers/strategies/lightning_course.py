"""What Lightning's loop calls: the step of the workload, its batches, and what our loop does around a step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from hpcjobs.trainers.data.loader import EpochOrder, Loader
from hpcjobs.trainers.loop.run import Run
from hpcjobs.trainers.optimization.step import Stepper
from hpcjobs.trainers.workloads.base import Batch


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

    def __init__(self, run: Run, loader: Loader, order: EpochOrder) -> None:
        self._run, self._loader, self._order = run, loader, order

    def __len__(self) -> int:
        order, plan = self._order, self._run.plan
        left = -(-order.count // order.world_size) - order.first_step * order.samples_per_step
        whole, rest = divmod(left, order.samples_per_step)
        return whole * plan.accumulate + -(-rest // plan.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        meter, size = self._run.recorder.meter, self._run.plan.batch_size
        batches = self._loader.epoch(self._order)
        for _ in range(len(self._order)):
            meter.begin()
            batch = next(batches)
            meter.data_ready()
            for start in range(0, len(batch[0]), size):
                yield tuple(part[start : start + size] for part in batch)


class Course(Callback):
    """What our loop does around a step: the rate, the line of metrics, the held-out part, the checkpoint."""

    def __init__(self, run: Run) -> None:
        self.run, self.step = run, run.first_step
        self._loader = Loader(run.workload.train, device=run.group.device, workers=run.config.workers)
        self._loss = torch.zeros((), device=run.group.device)

    @property
    def epoch(self) -> int:
        return self.step // self.run.plan.steps_per_epoch

    def batches(self) -> Batches:
        run = self.run
        order = EpochOrder(
            len(run.workload.train),
            run.group.rank,
            run.group.world_size,
            run.plan.samples_per_step,
            run.config.seed,
            self.epoch,
            first_step=self.step % run.plan.steps_per_epoch,
        )
        return Batches(run, self._loader, order)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for settings in self.run.stepper.optimizer.param_groups:
            settings["lr"] = self.run.plan.lr_at(self.step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._loss += outputs["loss"].detach()
        if trainer.fit_loop._should_accumulate():
            return
        epoch, recorder = self.epoch, self.run.recorder
        recorder.meter.end()
        recorder.add(self._loss)
        self._loss = torch.zeros_like(self._loss)
        self.step += 1
        self.run.end_step(self.step, epoch)


class OwnSignals(Callback):
    """The handlers that were there before `fit`: Lightning's tells the other ranks by a broadcast from within the
    signal, while the step it interrupts is at another collective."""

    def __init__(self) -> None:
        self._ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for number, handler in self._ours.items():
            signal.signal(number, handler)
