"""Lightning over Horovod: ``Trainer(strategy=HorovodStrategy(), devices=1, num_nodes=1)`` in every rank.

Lightning 2 has no strategy for Horovod any more. This one does not change optimizers, schedulers or loops: a hook on
each parameter hands its complete gradient to Horovod, and the end of a backward pass waits for all gradients. So
accumulation, clipping, manual optimization, several optimizers, schedulers and checkpoints work as with Lightning's
own DDP.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.strategies.horovod import hvd, make_contiguous, start, start_alone
from hpcjobs.trainers.strategies.lightning import LauncherEnvironment

OPERATIONS = {"sum": hvd.Sum, "mean": hvd.Average, "avg": hvd.Average, "min": hvd.Min, "max": hvd.Max}


class HorovodStrategy(ParallelStrategy):
    """Every rank holds the whole model. Give it to the Trainer as an instance, with ``devices=1``.

    ``group``: ranks that have met already; without it, the ranks meet now.
    """

    strategy_name = "horovod"
    is_distributed = True  # the Trainer then adds distributed samplers

    def __init__(
        self,
        *,
        compress: str = "none",
        controller: str = "auto",
        timeout_s: float = 60.0,
        group: RankGroup | None = None,
    ) -> None:
        if group is None:
            env = DistEnv.from_environ(os.environ)
            self.backend = start_alone(env, controller=controller, timeout_s=timeout_s)
        else:
            env = group.env
            self.backend = start(env, group.hosts, controller=controller, share=group.from_first, log=group.log)
        rank_zero_only.rank = fabric_rank_zero.rank = env.rank  # Lightning has read no rank of Horovod's launchers
        super().__init__(cluster_environment=LauncherEnvironment(env))
        self.num_nodes = 1
        self.compression = hvd.Compression.fp16 if compress == "fp16" else hvd.Compression.none
        self._quiet = False
        self._pending: dict[nn.Parameter, tuple[int, Any]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def root_device(self) -> torch.device:
        """This rank's share of the devices: with ``devices=1`` there is one, whatever the local rank."""
        assert self.parallel_devices
        device: torch.device = self.parallel_devices[self.local_rank % len(self.parallel_devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        assert self.model is not None
        make_contiguous(self.model)
        hvd.broadcast_parameters(dict(self.model.state_dict()), root_rank=0)
        for module in self.model.modules():
            if isinstance(module, Metric):  # it would ask torch.distributed, which knows of no group
                module.distributed_available_fn = lambda: self.world_size > 1
                module.dist_sync_fn = gather_metric
        if trainer.training and self.world_size > 1:
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    send = partial(self._send_unless_quiet, name)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(send))

    def _send_unless_quiet(self, name: str, parameter: Tensor) -> None:
        if not self._quiet:
            self._send(name, parameter)

    def _send(self, name: str, parameter: Any) -> None:
        if parameter.grad is None:  # unused here, perhaps used by another rank: all must send
            parameter.grad = torch.zeros_like(parameter)
        small, context = self.compression.compress(parameter.grad)
        self._pending[parameter] = (hvd.allreduce_async_(small, name=f"gradient {name}", op=hvd.Average), context)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Wait until the gradients of this pass have arrived: clipping and the optimizer may read them then."""
        if self._quiet or not self._hooks:
            return
        assert self.model is not None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter not in self._pending:
                self._send(name, parameter)
        for parameter, (handle, context) in self._pending.items():
            parameter.grad = self.compression.decompress(hvd.synchronize(handle), context)
        self._pending.clear()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Inside, gradients add up on each rank."""
        self._quiet = True
        try:
            yield
        finally:
            self._quiet = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over ranks; means of whole numbers and of 16 bit floats are taken in fp32."""
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op or "mean").lower().rpartition(".")[2].removeprefix("redoptype")
        operation = OPERATIONS[name]
        exact = tensor.is_floating_point() and tensor.element_size() >= 4
        wide = tensor if exact or (operation is hvd.Sum and not tensor.is_floating_point()) else tensor.float()
        reduced: Tensor = hvd.allreduce(wide, op=operation)
        return reduced

    def barrier(self, name: str | None = None) -> None:
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return hvd.broadcast_object(obj, root_rank=src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Ranks along a new first dimension."""
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            together: Tensor = hvd.allgather(tensor.unsqueeze(0))
        return together

    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        super().teardown()


def gather_metric(value: Tensor, group: Any = None) -> list[Tensor]:
    """Every rank's value, which may differ in its first dimension only."""
    if value.dim() == 0:
        return list(hvd.allgather(value.unsqueeze(0)).unbind())
    sizes = hvd.allgather(torch.tensor([len(value)])).tolist()
    return list(torch.split(hvd.allgather(value), sizes))
