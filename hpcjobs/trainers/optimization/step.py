"""One optimizer step, the same for every strategy and workload."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.strategies.base import Strategy
from hpcjobs.trainers.workloads.base import Batch, Workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Stepper:
    """Model, optimizer and scaler, and how one batch moves them."""

    def __init__(
        self, config: Config, workload: Workload, strategy: Strategy, *, group: RankGroup, plan: TrainingPlan
    ) -> None:
        self.workload, self.strategy, self.plan = workload, strategy, plan
        self.device, self.clip_norm = group.device, config.clip_norm
        self.dtype = DTYPES.get(config.precision)
        torch.manual_seed(config.seed)  # the same weights everywhere; afterwards each rank its own numbers
        bare = workload.build_model().to(group.device)
        self.parameters = sum(parameter.numel() for parameter in bare.parameters())
        self.model = strategy.wrap(bare, group=group, workload=workload, dtype=self.dtype)
        if not strategy.autocasts:
            self.dtype = None
        self.forward: nn.Module = cast(nn.Module, torch.compile(self.model)) if config.compile else self.model
        torch.manual_seed(config.seed + 1 + group.rank)
        plain = build_optimizer(strategy.parameters(self.model), workload, lr=plan.lr)
        self.optimizer = strategy.optimizer(plain, self.model)
        self.scaler = strategy.scaler(group.device.type, enabled=config.precision == "fp16")

    def step(self, batch: Batch, number: int) -> torch.Tensor:
        """Train on this rank's part of global batch `number`; its mean loss, still on the device."""
        for settings in self.optimizer.param_groups:
            settings["lr"] = self.plan.lr_at(number)
        loss = self.backward(batch)
        self.strategy.after_backward(self.model)
        if self.clip_norm is not None or self.strategy.holds_shards:
            self.scaler.unscale_(self.optimizer)  # where ranks hold shards, this also agrees on overflow
        if self.clip_norm is not None:
            self.strategy.clip(self.strategy.parameters(self.model), self.clip_norm)
        with self.strategy.stepping():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.strategy.zero_grad(self.optimizer)
        return loss

    def backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of the batch's mean loss; only the last of several passes synchronises."""
        total, size = len(batch[0]), self.plan.batch_size
        if total <= size:
            return self._pass(batch)
        mean = torch.zeros((), device=self.device)
        for start in range(0, total, size):
            part = tuple(samples[start : start + size] for samples in batch)
            quiet = self.strategy.no_sync(self.model) if start + size < total else nullcontext()
            with quiet:
                mean += self._pass(part, share=len(part[0]) / total)
        return mean

    def _pass(self, batch: Batch, *, share: float | None = None) -> torch.Tensor:
        """One forward and backward pass, whose loss counts for `share` of the whole; None: it is the whole."""
        with self.autocast():
            loss = self.workload.loss(self.forward, batch)
            if share is not None:
                loss = loss * share
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def autocast(self) -> AbstractContextManager[None]:
        """Around a forward pass: the lower precision, where the strategy leaves it to the loop."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)


def build_optimizer(parameters: list[nn.Parameter], workload: Workload, *, lr: float) -> torch.optim.Optimizer:
    """Fused kernels; weight decay where the workload asks for it."""
    if workload.optimizer == "sgd":
        fused = not any(isinstance(parameter, DTensor) for parameter in parameters)  # torch has it for AdamW alone
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=workload.weight_decay, fused=fused)
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=workload.weight_decay, fused=True)
