"""A callback of Lightning: metrics, checkpoints and stopping together, as `hpcjobs.runtime.start()` gives them.

callback = RunCallback(save_every=500)
trainer = Trainer(max_steps=10_000, callbacks=[callback], enable_checkpointing=False)
trainer.fit(model, data, ckpt_path=callback.find_checkpoint())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoint_writer import STORAGE_FULL
from hpcjobs.runtime.checkpoints import CheckpointMeta, Draft, measure
from hpcjobs.runtime.exits import StorageFault, UsageError, WorldMismatch, print_error
from hpcjobs.runtime.run import Run, start

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import CheckpointIO
except ImportError as error:
    raise UsageError("hpcjobs.callbacks.lightning needs the package lightning", hint="pip install lightning") from error

STATE = "state.ckpt"


class RunCallback(Callback):
    """Logs each optimizer step, saves every `save_every` of them and when the job is told to end, and stops all ranks.

    After `fit` it ends the run: by summary.json, or, if the job was told to end, by exit code 85.
    """

    def __init__(
        self, *, save_every: int | None = None, keep: int = 2, run_dir: str | None = None, log_to: Sequence[str] = ()
    ) -> None:
        self.save_every, self.keep = save_every, keep
        self.run: Run = start(run_dir=run_dir, step=0, log_to=log_to)
        """Log further numbers with its `log`."""
        self._folder = self.run.run_dir / checkpoints.FOLDER
        self._soundness = checkpoints.Soundness()
        self._claim = checkpoints.CheckpointClaim(self._folder) if self.run.rank == 0 else None
        self._step = 0
        self._losses: list[Any] = []
        self._validation_began = 0.0

    def find_checkpoint(self) -> str | None:
        """The newest sound checkpoint of the run, for `fit(ckpt_path=...)`; None before the first checkpoint.

        Raises BadCheckpoint: there are checkpoints, and all are damaged.
        """
        newest = checkpoints.resume_from(self._folder, report=self.run.print)
        return None if newest is None else str(newest / STATE)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise WorldMismatch if Lightning has started further processes: each of them is rank 0 of another run."""
        if trainer.world_size != self.run.world_size:
            raise WorldMismatch(
                f"Lightning has {trainer.world_size} ranks, and this process was started as one of "
                f"{self.run.world_size}",
                hint=f"hpcjobs submit, or torchrun --nproc-per-node {trainer.num_devices} SCRIPT, starts all ranks",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resume at the step that Lightning has loaded, and restore our signal handlers, which it has replaced."""
        total_steps = trainer.estimated_stepping_batches
        self._step = trainer.global_step
        self.run.resume(self._step, total_steps=int(total_steps) if total_steps != float("inf") else None)
        self.run.listen()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:  # Lightning has divided it by the number of passes
            scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._losses.append(loss.detach() * scale if hasattr(loss, "detach") else loss * scale)
        if trainer.global_step == self._step:  # gradients are still being accumulated
            return
        self._step = trainer.global_step
        loss, self._losses = sum(self._losses) / len(self._losses) if self._losses else None, []
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.run.log(self._step, lr=rate, epoch=trainer.current_epoch, **({} if loss is None else {"loss": loss}))
        if self.run.should_stop():
            trainer.should_stop = True
        if self.run.stopping or (self.save_every is not None and self._step % self.save_every == 0):
            self._save(trainer, last=self.run.stopping or self._step == self.run.total_steps)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run.exclude(time.perf_counter() - self._validation_began)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.run.stopping and self.save_every is not None and self._step % self.save_every:
            self._save(trainer, last=True)
        self.run.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.run.flush()

    def _save(self, trainer: Trainer, *, last: bool = False) -> None:
        """Save a checkpoint, as a collective call: Lightning gathers, or each rank writes its part.

        The folder is renamed after all ranks have written. If storage fails, only this checkpoint is lost, and the next
        one is tried; for the last one StorageFault is raised.
        """
        with self.run.exclude_time():
            self._write(trainer, last=last)

    def _write(self, trainer: Trainer, *, last: bool) -> None:
        meta = CheckpointMeta(self._step, trainer.current_epoch, 0, self.run.world_size, self.run.metrics_bytes, None)
        draft = Draft(self._folder, meta, claim=self._claim, owner=f"kit-{self.run.attempt}")
        wrong = self._do_on_first_rank(trainer, draft.begin)
        if wrong is None:
            storage = _Storage(trainer.strategy.checkpoint_io)
            trainer.strategy.checkpoint_io = storage
            try:
                trainer.save_checkpoint(draft.path / STATE)
            finally:
                trainer.strategy.checkpoint_io = storage.inner
            trainer.strategy.barrier("hpcjobs.saved")  # rank 0 sums up the files of all ranks next
            wrong = self._do_on_first_rank(trainer, lambda: self._complete(draft, storage.error))
        if wrong is None:
            self.run.record_saved_step(self._step)
        elif last:
            raise StorageFault(
                f"step {self._step} can't be saved: {wrong}",
                hint="free space or quota there; the checkpoints before it are complete, the next start finds them",
            )
        elif self.run.rank == 0:
            print_error(f"warning: checkpoint of step {self._step} not written: {wrong}; the run goes on")

    def _complete(self, draft: Draft, error: OSError | None) -> None:
        if error is not None:
            draft.discard()
            raise error
        files = [path for path in sorted(draft.path.rglob("*")) if path.is_file()]
        draft.complete({str(path.relative_to(draft.path)): measure(path) for path in files})
        checkpoints.prune(self._folder, keep=self.keep, soundness=self._soundness, owner=draft.owner)

    def _do_on_first_rank(self, trainer: Trainer, work: Callable[[], object]) -> str | None:
        """Have rank 0 do `work`; return its storage error, or None, on every rank."""
        wrong = None
        if self.run.rank == 0:
            try:
                work()
            except OSError as error:
                wrong = f"{error.filename or self._folder}: {error.strerror or error}"
                if error.errno in STORAGE_FULL:  # room for the next try: one good checkpoint is enough
                    checkpoints.prune(self._folder, keep=1, soundness=self._soundness)
        return cast("str | None", trainer.strategy.broadcast(wrong))


class _Storage(CheckpointIO):
    """Keeps an error of the storage: rank 0 alone meets it, and must not leave the others in Lightning's barrier."""

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner
        self.error: OSError | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        try:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
        except OSError as error:
            self.error = error

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return cast("dict[str, Any]", self.inner.load_checkpoint(path, *args, **options))

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
