"""Evaluates the held-out part: each sample counts once, whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from hpcjobs.record.summary import Evaluation
from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.data.loader import HeldOutOrder, Loader
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.optimization.step import Stepper
from hpcjobs.trainers.workloads.base import Batch, Score, Workload, count_samples, split_loss

TENSOR = ""  # the key of the score's tensor, among the names of metrics


class Evaluator:
    """When the held-out part is evaluated, and how: in the precision and by the loader settings of training."""

    def __init__(
        self, config: Config, workload: Workload, stepper: Stepper, *, plan: TrainingPlan, group: RankGroup
    ) -> None:
        self.workload, self.stepper, self.plan, self.group = workload, stepper, plan, group
        held_out = workload.held_out
        self.on, self.every = held_out is not None and config.eval_every != 0, config.eval_every
        if held_out is None or not self.on:
            return
        if len(held_out) == 0:
            raise UsageError(
                f"held_out of the workload {workload.name} has no samples",
                hint="held_out=None, or --eval-every 0, trains without evaluation",
            )
        self._order = HeldOutOrder(
            len(held_out), group.rank, group.world_size, plan.batch_size, config.seed, config.eval_batches
        )
        self._loader = Loader(held_out, device=group.device, workers=config.workers or 0)

    def due(self, step: int) -> bool:
        """Whether to evaluate now: after every `every` steps or every epoch, and after the last step."""
        if not self.on or step == 0:
            return False
        regular = self.plan.ends_epoch(step) if self.every is None else step % self.every == 0
        return regular or step == self.plan.total_steps

    def evaluate(self, boundary: Callable[[], None]) -> Evaluation:
        """Scores the model; a collective call. `boundary` is called after each pass, and may end it by an exception."""
        model, group = self.stepper.forward, self.group
        sums: dict[str, torch.Tensor] = {}
        model.eval()
        with torch.no_grad(), self.stepper.weights_to_evaluate():
            for number, batch in enumerate(self._loader.epoch(self._order)):
                with self.stepper.autocast():
                    score = self._score(model, batch)
                counts = bool(self._order.batch(number))
                for name, value in {TENSOR: score.tensor, **score.metrics}.items():
                    sums[name] = sums.get(name, 0) + counts * value.double()
                boundary()
        model.train()
        names = [name for name in sums if name != TENSOR]
        flat = torch.cat([sums[TENSOR], *(sums[name].reshape(1) for name in names)])
        loss_sum, correct, count, *totals = group.sum(flat).tolist()
        loss = loss_sum / count
        accuracy = None if math.isnan(correct) else correct / count
        perplexity = math.exp(min(loss, 700.0)) if self.workload.perplexity else None
        metrics = {name: total / count for name, total in zip(names, totals, strict=True)}
        return Evaluation(loss, accuracy, int(count), perplexity, metrics)

    def _score(self, model: nn.Module, batch: Batch) -> Score:
        """Return the workload's score, or a score from its loss and metrics, which are means over the batch."""
        if self.workload.evaluate is not None:
            return self.workload.evaluate(model, batch)
        samples = count_samples(batch)
        loss, metrics = split_loss(self.workload.loss(model, batch), self.workload)
        loss = loss.double().reshape(())
        tensor = torch.stack([loss * samples, torch.full_like(loss, math.nan), torch.full_like(loss, samples)])
        return Score(tensor, {name: samples * value for name, value in metrics.items()})
