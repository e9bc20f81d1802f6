"""Saves checkpoints, resumes from one, and stops all ranks together on request."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hpcjobs.runtime import checkpoints, signals
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import LossNotFinite, Requeue, StorageFault
from hpcjobs.runtime.signals import JobControl
from hpcjobs.runtime.streams import print_error
from hpcjobs.trainers.checkpoint import format as checkpoint
from hpcjobs.trainers.checkpoint import state as resume
from hpcjobs.trainers.checkpoint.format import CheckpointWriter, WriterGroup
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.metrics.recorder import Recorder
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.optimization.step import Stepper

LAST_SAVE_S = 120.0
"""A run that ends or must stop tries this long to write its last checkpoint."""


STOP_SIGNALS = (None, "SIGUSR1", "SIGTERM")


class FaultTolerance(JobControl):
    """One rank's side of the control directory. Has no effect if no job script would start the run again."""

    def __init__(self, group: RankGroup, stop: signals.Stop | None) -> None:
        super().__init__(stop, rank=group.rank)
        self.group = group
        self._flag = torch.zeros((), dtype=torch.int32)
        self._vote: dist.Work | None = None

    def close(self) -> None:
        if self._vote is not None:
            self._vote.wait()
        super().close()

    def agree_on_stop(self) -> str | None:
        """At every boundary, on every rank: the signal that some rank has got, the same answer for all.

        The answer is the one to the previous boundary's question, so that no rank waits for it.
        """
        if self.stop is None:
            return None
        if self.group.world_size == 1:
            return self.stop.requested
        signal_name = None
        if self._vote is not None:
            self._vote.wait()
            signal_name = STOP_SIGNALS[int(self._flag)]
        self._flag.fill_(STOP_SIGNALS.index(self.stop.requested))
        self._vote = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)
        return signal_name

    def request_requeue(self, step: int, why: str) -> None:
        """Everything is saved, on all ranks' behalf: ask to be started again."""
        self.group.barrier()
        if self.group.rank == 0:
            signals.request_requeue(step)
        self.group.log(f"stopped by {why} after step {step}, saved; asks to be started again")
        raise Requeue(f"stopped by {why} after step {step}")


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
    """All ranks; a collective call."""
    return WriterGroup(group.aside(), int(group.from_first(str(os.getpid()))))


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
        plan: TrainingPlan,
        group: RankGroup,
    ) -> None:
        self.every, self.plan, self.group = config.checkpoint_every, plan, group
        self.every_epochs = config.save_every_epochs
        self.stepper, self.recorder, self.fault_tolerance = stepper, recorder, fault_tolerance
        folder = run_dir / checkpoints.FOLDER
        in_parts = stepper.strategy.in_parts
        self._writes = in_parts or group.rank == 0
        self._writer = CheckpointWriter(
            folder,
            keep=config.checkpoint_keep,
            background=config.checkpoint_async,
            on_written=fault_tolerance.record_saved_step,
            together=make_writer_group(group) if in_parts else None,
            first=group.rank == 0,
            agree=group.agree if in_parts else lambda mine: mine,
        )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._writes and isinstance(error[1], LossNotFinite):  # on all ranks; what was saved before is sound
                self._writer.finish(within_s=min(self.fault_tolerance.left_s, LAST_SAVE_S))
        except StorageFault as fault:
            print_error(f"warning: {fault}")
        finally:
            self._writer.close()

    @property
    def stall_s(self) -> list[float]:
        return self._writer.stall_s

    def due(self, step: int) -> bool:
        if self.every is None and self.every_epochs is None:
            return False
        of_steps = self.every is not None and step % self.every == 0
        of_epochs = self.every_epochs is not None and self.plan.ends_epoch(step, every=self.every_epochs)
        return step == self.plan.total_steps or of_steps or of_epochs

    def save(self, step: int, epoch: int) -> None:
        """A collective call; rank 0 writes, or says why it can't and tries again at a later save.

        Where ranks hold parts of the state, each writes its own.
        """
        with self.stepper.trained_weights():
            resume.refuse_nan(self.stepper, self.group, step=step)
            state = resume.capture(self.stepper, self.group)
            if self._writes:
                self._writer.save(self._meta(step, epoch), state, last=step == self.plan.total_steps)
                self._publish_times()
        self.record_written()

    def record_written(self) -> None:
        """A line of metrics for each checkpoint that came to the disk since the last call."""
        for step, stall_s in self._writer.take_written():
            self.recorder.record_checkpoint(step, stall_s)

    def save_blocking(self, step: int, epoch: int) -> None:
        """A collective call: the last save of this attempt, on disk before this returns.

        Raises StorageFault on rank 0 if the storage does not take it in time.
        """
        with self.stepper.trained_weights():
            resume.refuse_nan(self.stepper, self.group, step=step)
            state = resume.capture(self.stepper, self.group)
            if self._writes:
                self._writer.save_blocking(
                    self._meta(step, epoch), state, within_s=min(self.fault_tolerance.left_s, LAST_SAVE_S)
                )
                self._publish_times()

    def _publish_times(self) -> None:
        if self.group.rank == 0:
            self.fault_tolerance.publish_times(self.recorder.meter.recent_steps, self._writer.write_s)

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

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if self._writes:
            self._writer.finish(within_s=min(self.fault_tolerance.left_s, LAST_SAVE_S))
        self.record_written()
