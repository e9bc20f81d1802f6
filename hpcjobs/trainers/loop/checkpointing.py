"""When a run saves, and how it takes up a saved run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hpcjobs.trainers.checkpoint import format as checkpoint
from hpcjobs.trainers.checkpoint import state as resume
from hpcjobs.trainers.checkpoint.format import Moment, Together
from hpcjobs.trainers.checkpoint.writer import Saver
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.distributed.process_group import Group
from hpcjobs.trainers.fault_tolerance.requeue import FaultTolerance
from hpcjobs.trainers.metrics.recorder import Recorder
from hpcjobs.trainers.optimization.plan import Plan
from hpcjobs.trainers.optimization.step import Stepper

INSIST_S = 120.0
"""How long a run that ends, or is to stop, goes on trying to write its last checkpoint."""


def take_up(config: Config, stepper: Stepper, run_dir: Path, *, plan: Plan, group: Group) -> Moment | None:
    """Load the checkpoint that `--resume` means; where this run now stands, None at the start."""
    place = resume.choose(config.resume, run_dir, group)
    if place is None:
        return None
    strategy = stepper.strategy
    moment, state = checkpoint.read(place, lambda where: strategy.placed(stepper.model, stepper.optimizer, where))
    resume.restore(state, stepper, group)
    step = resume.position(moment, plan)
    group.say(f"resumed from {place} at step {step}{resume.changes(moment, plan)}")
    elsewhere = place.parent.parent != run_dir.resolve()  # another run's metrics are not this one's
    return replace(moment, step=step, metrics_bytes=0 if elsewhere else moment.metrics_bytes)


def writers(group: Group) -> Together:
    """All ranks; a collective call."""
    return Together(group.aside(), group.rank == 0, int(group.from_first(str(os.getpid()))))


class Checkpoints:
    """Saves every `--checkpoint-every` steps or `--save-every-epochs` epochs, and at the end; without these, never."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stepper: Stepper,
        recorder: Recorder,
        fault_tolerance: FaultTolerance,
        *,
        plan: Plan,
        group: Group,
    ) -> None:
        self.every, self.plan, self.group = config.checkpoint_every, plan, group
        epochs = config.save_every_epochs
        self.every_epochs = None if epochs is None else epochs * plan.steps_per_epoch  # in steps
        self.stepper, self.recorder, self.fault_tolerance = stepper, recorder, fault_tolerance
        folder = run_dir / checkpoint.FOLDER
        in_parts = stepper.strategy.in_parts
        self._writes = in_parts or group.rank == 0
        self._saver = Saver(
            folder,
            keep=config.checkpoint_keep,
            background=config.checkpoint_async,
            written=fault_tolerance.saved,
            together=writers(group) if in_parts else None,
            agreed=group.agreed if in_parts else lambda mine: mine,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self._saver.close()

    @property
    def stall_s(self) -> list[float]:
        return self._saver.stall_s

    def due(self, step: int) -> bool:
        counts = [every for every in (self.every, self.every_epochs) if every is not None]
        return bool(counts) and (step == self.plan.total_steps or any(step % every == 0 for every in counts))

    def save(self, step: int, epoch: int) -> None:
        """A collective call; rank 0 writes, or says why it can't and tries again at a later save.

        Where ranks hold parts of the state, each writes its own.
        """
        state = resume.capture(self.stepper, self.group)
        if self._writes:
            self._saver.save(self._moment(step, epoch), state, last=step == self.plan.total_steps)
            self.recorder.saved(step, self._saver.stall_s[-1])
            self._tell_times()

    def insist(self, step: int, epoch: int) -> None:
        """A collective call: the last save of this attempt, on disk before this returns.

        Raises StorageFault on rank 0 if the storage does not take it in time.
        """
        state = resume.capture(self.stepper, self.group)
        if self._writes:
            self._saver.insist(self._moment(step, epoch), state, within_s=min(self.fault_tolerance.left_s, INSIST_S))
            self._tell_times()

    def _tell_times(self) -> None:
        if self.group.rank == 0:
            self.fault_tolerance.measured(self.recorder.meter.recent_steps, self._saver.write_s)

    def _moment(self, step: int, epoch: int) -> Moment:
        evaluation = self.recorder.evaluation_at(step)
        return Moment(
            step=step,
            epoch=epoch,
            epoch_samples=(step - epoch * self.plan.steps_per_epoch) * self.plan.global_batch_size,
            world_size=self.group.world_size,
            metrics_bytes=self.recorder.metrics_bytes_at(step),
            loss=None if evaluation is None else evaluation.loss,
        )

    def finish(self) -> None:
        """Until the last checkpoint is on disk."""
        if self._writes:
            self._saver.finish(within_s=min(self.fault_tolerance.left_s, INSIST_S))
