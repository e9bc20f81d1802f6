"""The held-out part, each sample counted once whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hpcjobs.runtime.summary import Evaluation
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.data.loader import HeldOutOrder, Loader
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.optimization.step import Stepper
from hpcjobs.trainers.workloads.base import Workload


class Evaluator:
    """When the held-out part is evaluated, and how: in the precision and by the loader settings of training."""

    def __init__(
        self, config: Config, workload: Workload, stepper: Stepper, *, plan: TrainingPlan, group: RankGroup
    ) -> None:
        self.workload, self.stepper, self.plan, self.group = workload, stepper, plan, group
        self.every = plan.steps_per_epoch if config.eval_every is None else config.eval_every
        held_out = workload.held_out
        if held_out is None or self.every == 0:
            self.every = 0
            return
        self._order = HeldOutOrder(
            len(held_out), group.rank, group.world_size, plan.batch_size, config.seed, config.eval_batches
        )
        self._loader = Loader(held_out, device=group.device, workers=config.workers)

    def due(self, step: int) -> bool:
        """After every so many steps, and after the last one."""
        return self.every > 0 and step > 0 and (step % self.every == 0 or step == self.plan.total_steps)

    def evaluate(self, boundary: Callable[[], None]) -> Evaluation:
        """Scores the model; a collective call. `boundary` is called after each pass, and may end it by an exception."""
        model, group = self.stepper.forward, self.group
        sums = torch.zeros(3, dtype=torch.float64, device=group.device)
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(self._loader.epoch(self._order)):
                with self.stepper.autocast():
                    score = self.workload.evaluate(model, batch).tensor
                if self._order.batch(number):
                    sums += score
                boundary()
        model.train()
        loss_sum, correct, count = group.sum(sums).tolist()
        loss = loss_sum / count
        perplexity = math.exp(min(loss, 700.0)) if self.workload.perplexity else None
        return Evaluation(loss, correct / count, int(count), perplexity)
