"""A callback of Lightning: metrics, checkpoints and stopping together, as `hpcjobs.runtime.start()` gives them.

callback = RunCallback(save_every=500)
trainer = Trainer(max_steps=10_000, callbacks=[callback], enable_checkpointing=False)
trainer.fit(model, data, ckpt_path=callback.find_checkpoint())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoints import CheckpointMeta, Draft, measure
from hpcjobs.runtime.exits import UsageError, WorldMismatch
from hpcjobs.runtime.run import Run
from hpcjobs.runtime.script_start import start

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise UsageError("hpcjobs.callbacks.lightning needs the package lightning", hint="pip install lightning") from error

STATE = "state.ckpt"


class RunCallback(Callback):
    """Logs each optimizer step, saves every `save_every` of them and when the job is told to end, and stops all ranks.

    After `fit` it ends the run: by summary.json, or, where the job was told to end, by exit code 85.
    """

    def __init__(
        self, *, save_every: int | None = None, keep: int = 2, run_dir: str | None = None, log_to: Sequence[str] = ()
    ) -> None:
        self.save_every, self.keep = save_every, keep
        self.run: Run = start(run_dir=run_dir, step=0, log_to=log_to)
        """Log numbers of your own by its `log`."""
        self._folder = self.run.run_dir / checkpoints.FOLDER
        self._soundness = checkpoints.Soundness()
        self._step = 0
        self._losses: list[Any] = []

    def find_checkpoint(self) -> str | None:
        """The newest sound checkpoint of the run, for `fit(ckpt_path=...)`; None: there is none yet."""
        for place, wrong in checkpoints.newest_valid(self._folder):
            if wrong is None:
                return str(place / STATE)
            self.run.print(f"passing over the damaged checkpoint {place.name}: {wrong}")
        return None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises WorldMismatch where Lightning has started further processes, each of which is rank 0 of a run."""
        if trainer.world_size != self.run.world_size:
            raise WorldMismatch(
                f"Lightning has {trainer.world_size} ranks, and this process was started as one of "
                f"{self.run.world_size}",
                hint=f"hpcjobs submit, or torchrun --nproc-per-node {trainer.num_devices} SCRIPT, starts all ranks",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has put handlers of its own in place of ours, and has loaded the checkpoint."""
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
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.run.stopping and self.save_every is not None and self._step % self.save_every:
            self._save(trainer)
        self.run.finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.run.flush()

    def _save(self, trainer: Trainer) -> None:
        """A collective call: Lightning gathers, or each rank writes its part; the folder is renamed when all have."""
        meta = CheckpointMeta(self._step, trainer.current_epoch, 0, self.run.world_size, self.run.metrics_bytes, None)
        draft = Draft(self._folder, meta, owner=f"kit-{self.run.attempt}")
        if self.run.rank == 0:
            draft.begin()
        trainer.strategy.barrier("hpcjobs.draft")
        trainer.save_checkpoint(draft.path / STATE)
        trainer.strategy.barrier("hpcjobs.saved")
        if self.run.rank == 0:
            files = [path for path in sorted(draft.path.rglob("*")) if path.is_file()]
            draft.complete({str(path.relative_to(draft.path)): measure(path) for path in files})
            checkpoints.prune(self._folder, keep=self.keep, soundness=self._soundness, owner=draft.owner)
        self.run.record_saved_step(self._step)
        trainer.strategy.barrier("hpcjobs.renamed")
