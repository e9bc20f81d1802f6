"""Decides when a trainer saves checkpoints and where it resumes; combines the ranks' requests to stop."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoint_writer import CheckpointKeeper
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import LossNotFinite, StorageFault, print_error
from hpcjobs.runtime.signals import JobControl
from hpcjobs.trainers.checkpoint import format as checkpoint
from hpcjobs.trainers.checkpoint import state as resume
from hpcjobs.trainers.checkpoint.format import CheckpointWriter, WriterGroup
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.metrics.recorder import Recorder
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.optimization.step import Stepper


class PipelinedMax:
    """The maximum over all ranks, one call late: a call returns the result of the call before, so no rank waits."""

    def __init__(self) -> None:
        self._largest = torch.zeros((), dtype=torch.int32)
        self._reduction: dist.Work | None = None

    def __call__(self, mine: int) -> int:
        self.close()
        largest = int(self._largest)
        self._largest.fill_(mine)
        self._reduction = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, async_op=True)
        return largest

    def close(self) -> None:
        """Wait for the newest call."""
        if self._reduction is not None:
            self._reduction.wait()


def resume_run(
    config: Config, stepper: Stepper, run_dir: Path, *, plan: TrainingPlan, group: RankGroup
) -> CheckpointMeta | None:
    """Load the checkpoint that `--resume` names. Returns its metadata; None without one."""
    place = resume.choose(config.resume, run_dir, group)
    if place is None:
        return None
    strategy = stepper.strategy
    meta, state = checkpoint.read(place, lambda where: strategy.allocate_shard(stepper.model, stepper.optimizer, where))
    resume.restore(state, stepper, group)
    group.log(f"resumed from {place} at step {meta.step}{resume.changes(meta, plan)}")
    elsewhere = place.parent.parent != run_dir.resolve()  # another run's metrics are not this one's
    return replace(meta, metrics_bytes=0 if elsewhere else meta.metrics_bytes)


def make_writer_group(group: RankGroup) -> WriterGroup:
    """Make the group of all ranks; a collective call."""
    return WriterGroup(group.aside(), int(group.from_first(str(os.getpid()))))


class Checkpoints(CheckpointKeeper):
    """Saves every `--checkpoint-every` steps or `--save-every-epochs` epochs, and at the end; without these, never."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stepper: Stepper,
        recorder: Recorder,
        control: JobControl,
        *,
        plan: TrainingPlan,
        group: RankGroup,
    ) -> None:
        self.every, self.plan, self.group = config.checkpoint_every, plan, group
        self.every_epochs = config.save_every_epochs
        self.stepper, self.recorder = stepper, recorder
        in_parts = stepper.strategy.in_parts
        self._writes = in_parts or group.rank == 0
        writer = CheckpointWriter(
            run_dir / checkpoints.FOLDER,
            keep=config.checkpoint_keep,
            background=config.checkpoint_async,
            on_written=control.record_saved_step,
            together=make_writer_group(group) if in_parts else None,
            first=group.rank == 0,
            agree=group.agree if in_parts else lambda mine: mine,
        )
        super().__init__(writer, control, record=recorder.record_checkpoint, step_s=lambda: recorder.meter.recent_steps)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if isinstance(error[1], LossNotFinite):  # raised on all ranks; earlier checkpoints are sound
                self.finish()
        except StorageFault as fault:
            print_error(f"warning: {fault}")
        finally:
            self.close()

    def due(self, step: int) -> bool:
        if self.every is None and self.every_epochs is None:
            return False
        of_steps = self.every is not None and step % self.every == 0
        of_epochs = self.every_epochs is not None and self.plan.ends_epoch(step, every=self.every_epochs)
        return step == self.plan.total_steps or of_steps or of_epochs

    def save(self, step: int, epoch: int, *, blocking: bool = False) -> None:
        """Save the state; a collective call. If rank 0 can't write, it prints why, and tries again at a later save.

        If ranks hold parts of the state, each writes its parts. `blocking`: the last save of this attempt, on disk
        before this returns; StorageFault on rank 0 if the storage does not take it in time.
        """
        with self.stepper.trained_weights():
            resume.refuse_nan(self.stepper, self.group, step=step)
            state = resume.capture(self.stepper, self.group)
            if self._writes:
                self.write(self._meta(step, epoch), state, last=step == self.plan.total_steps, blocking=blocking)

    def _meta(self, step: int, epoch: int) -> CheckpointMeta:
        evaluation = self.recorder.evaluation_at(step)
        return CheckpointMeta(
            step=step,
            epoch=epoch,
            epoch_samples=self.plan.samples_of_epoch(epoch, step),
            world_size=self.group.world_size,
            metrics_bytes=self.recorder.metrics_bytes_at(step),
            loss=None if evaluation is None else evaluation.loss,
        )
