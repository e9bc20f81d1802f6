"""When a run saves, and how it takes up a saved run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpcjobs.trainers.core import checkpoint, resume
from hpcjobs.trainers.core.checkpoint import Moment
from hpcjobs.trainers.core.config import Config
from hpcjobs.trainers.core.group import Group
from hpcjobs.trainers.core.plan import Plan
from hpcjobs.trainers.core.record import Recorder
from hpcjobs.trainers.core.saver import Saver
from hpcjobs.trainers.core.step import Stepper


def take_up(config: Config, stepper: Stepper, run_dir: Path, *, plan: Plan, group: Group) -> Moment | None:
    """Load the checkpoint that `--resume` means; where this run now stands, None at the start."""
    place = resume.choose(config.resume, run_dir, group)
    if place is None:
        return None
    moment, state = checkpoint.read(place)
    resume.restore(state, stepper, group)
    step = resume.position(moment, plan)
    group.say(f"resumed from {place} at step {step}{resume.changes(moment, plan)}")
    elsewhere = place.parent.parent != run_dir.resolve()  # another run's metrics are not this one's
    return replace(moment, step=step, metrics_bytes=0 if elsewhere else moment.metrics_bytes)


class Checkpoints:
    """Saves every `--checkpoint-every` steps and at the end; does nothing where that was not said."""

    def __init__(
        self, config: Config, run_dir: Path, stepper: Stepper, recorder: Recorder, *, plan: Plan, group: Group
    ) -> None:
        self.every, self.plan, self.group = config.checkpoint_every, plan, group
        self.stepper, self.recorder = stepper, recorder
        folder = run_dir / checkpoint.FOLDER
        self._saver = Saver(folder, keep=config.checkpoint_keep, background=config.checkpoint_async)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        self._saver.close()

    @property
    def stall_s(self) -> list[float]:
        return self._saver.stall_s

    def due(self, step: int) -> bool:
        return self.every is not None and (step % self.every == 0 or step == self.plan.total_steps)

    def save(self, step: int, epoch: int) -> None:
        """A collective call; rank 0 writes."""
        state = resume.capture(self.stepper, self.group)
        if self.group.rank != 0:
            return
        evaluation = self.recorder.evaluation
        moment = Moment(
            step=step,
            epoch=epoch,
            epoch_samples=(step - epoch * self.plan.steps_per_epoch) * self.plan.global_batch_size,
            world_size=self.group.world_size,
            metrics_bytes=self.recorder.metrics_bytes,
            loss=None if evaluation is None else evaluation.loss,
        )
        self._saver.save(moment, state)
        self.recorder.saved(step, self._saver.stall_s[-1])

    def finish(self) -> None:
        """Until the last checkpoint is on disk."""
        self._saver.wait()
