"""A callback of the Hugging Face Trainer: metrics, and stopping together, as `hpcjobs.runtime.start()` gives them.

callback = RunCallback()
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
trainer.train(resume_from_checkpoint=callback.find_checkpoint(arguments.output_dir))
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcjobs.record.summary import write_json
from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoints import measure
from hpcjobs.runtime.exits import UsageError, print_error
from hpcjobs.runtime.run import Run, start

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise UsageError(
        "hpcjobs.callbacks.huggingface needs the package transformers", hint="pip install transformers"
    ) from error

SUMS = "hpcjobs.sums.json"
"""File in a checkpoint with the size and CRC-32 of every other file."""
NAMES = {"learning_rate": "lr", "grad_norm": "gradient_norm"}


class RunCallback(TrainerCallback):
    """Logs the Trainer's metrics, adds checksums to its checkpoints; has it save and stop when the job is told to end.

    After `train` it ends the run: by summary.json, or, if the job was told to end, by exit code 85.
    """

    def __init__(self, *, run_dir: str | None = None, log_to: Sequence[str] = ()) -> None:
        self.run: Run = start(run_dir=run_dir, step=0, log_to=log_to)
        """Log further numbers with its `log`."""
        self._logged_step = 0
        self._epoch_samples: int | None = None
        self._steps_ended = 0.0
        """When the newest step ended, or the line, the evaluation or the checkpoint after it."""

    def find_checkpoint(self, output_dir: str) -> str | None:
        """The Trainer's newest sound checkpoint, for `train(resume_from_checkpoint=...)`; None without one."""
        places = [place for place in Path(output_dir).glob("checkpoint-*") if place.name.rpartition("-")[2].isdecimal()]
        for place in sorted(places, key=lambda place: -int(place.name.rpartition("-")[2])):
            wrong = find_damage(place)
            if wrong is None:
                return str(place)
            self.run.print(f"passing over the checkpoint {place.name}: {wrong}")
        return None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.run.resume(state.global_step, total_steps=state.max_steps)
        self.run.listen()
        self._logged_step = state.global_step
        loader = kwargs.get("train_dataloader")
        try:
            self._epoch_samples = count_epoch_samples(loader, args, world_size=self.run.world_size)
        except TypeError:  # a stream has no length, and full batches
            self._epoch_samples = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        values = {NAMES.get(name, name): n for name, n in (logs or {}).items() if isinstance(n, (int, float))}
        if "loss" not in values:  # of an evaluation, or the sums at the end
            return
        samples = self._count_samples(args, state.global_step) - self._count_samples(args, self._logged_step)
        self._logged_step = state.global_step
        self.run.log(state.global_step, **values, samples=samples)
        self._steps_ended = time.perf_counter()  # time before this line belongs to its step

    def _count_samples(self, args: TrainingArguments, steps: int) -> int:
        """Samples of this rank in the first `steps` steps; the last one of an epoch may be smaller."""
        per_step: int = args.train_batch_size * args.gradient_accumulation_steps
        if self._epoch_samples is None:
            return steps * per_step
        epochs, rest = divmod(steps, max(1, -(-self._epoch_samples // per_step)))
        return epochs * self._epoch_samples + min(rest * per_step, self._epoch_samples)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._steps_ended = time.perf_counter()
        if self.run.should_stop():
            control.should_log = control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wait_for_all()  # each rank writes the state of its generators
        if self.run.rank == 0:
            place = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            try:
                self._complete(place)
                self.run.record_saved_step(state.global_step)
            except OSError as error:  # the next start skips it
                print_error(
                    f"warning: checkpoint of step {state.global_step} not completed: {error.filename or place}: "
                    f"{error.strerror or error}; the run goes on"
                )
        else:
            self.run.record_saved_step(state.global_step)
        wait_for_all()
        self._exclude_since_step()

    def _complete(self, place: Path) -> None:
        """Add the sums that make a checkpoint of the Trainer complete, with the metrics of its steps on disk."""
        self.run.flush()
        files = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name != SUMS]
        write_json(place / SUMS, {str(path.relative_to(place)): measure(path) for path in files})

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._steps_ended = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._exclude_since_step()

    def _exclude_since_step(self) -> None:
        """Evaluations and checkpoints follow a step or an epoch, one after the other."""
        now = time.perf_counter()
        self.run.exclude(now - self._steps_ended)
        self._steps_ended = now

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.run.finish()


def count_epoch_samples(loader: Any, args: TrainingArguments, *, world_size: int) -> int:
    """Samples of one rank in an epoch: with several ranks, the Trainer fills the last batches up."""
    if args.dataloader_drop_last or world_size > 1:
        return int(len(loader) * args.train_batch_size)
    return len(loader.dataset)


def find_damage(place: Path) -> str | None:
    """The damage of a checkpoint of the Trainer, or None."""
    try:
        return checkpoints.find_changed_file(place, json.loads((place / SUMS).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        return f"it was not completed: {error}"


def wait_for_all() -> None:
    """Wait until all ranks have come here."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
