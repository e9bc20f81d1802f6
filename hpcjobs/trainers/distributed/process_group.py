"""The process group: formed against a deadline, used by a few verbs, left cleanly."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.distributed.errors import elect_reporter, translate_error
from hpcjobs.trainers.distributed.rendezvous import open_store, roll_call

_HELD: list[dist.ProcessGroup | None] = []
"""Until `release_groups`: whoever lets a group go last waits for gloo's threads, which may need the interpreter to end.
Python's own reference waits without it; that of DDP's reducer would wait with it, for ever."""


@dataclass(frozen=True)
class RankGroup:
    env: DistEnv
    hosts: tuple[str, ...]  # by rank
    device: torch.device
    backend: str

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def rows(self, mine: Sequence[float]) -> torch.Tensor:
        """A row of numbers from every rank, by rank: [world size, numbers] in fp64, on the host."""
        rows = torch.zeros(self.world_size, len(mine), dtype=torch.float64)
        rows[self.rank] = torch.tensor(mine, dtype=torch.float64)
        return self.sum(rows.to(self.device)).cpu()

    def gather(self, value: object) -> list[object]:
        """Every rank's value, by rank, on every rank."""
        everyone: list[object] = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def from_first(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        return str(self.gather(value if self.rank == 0 else None)[0])

    def agree(self, mine: bool) -> bool:
        """Rank 0's verdict, on every rank."""
        return bool(self.sum(torch.tensor(int(mine and self.rank == 0), device=self.device)))

    def aside(self) -> dist.ProcessGroup:
        """All ranks once more, for a thread that must not mix with the collectives of the main one."""
        aside: dist.ProcessGroup = dist.new_group(backend="gloo")
        return aside

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def log(self, text: str) -> None:
        """A line of progress, from rank 0."""
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def join_world(env: DistEnv, *, device: str, timeout_s: float) -> Iterator[RankGroup]:
    """Form the world, or say who is missing; inside, errors from below become ours, told by one rank."""
    store = open_store(env, timeout_s)
    try:
        group = _form(env, store, device, timeout_s)
        yield group
        group.barrier()
        dist.destroy_process_group()
    except Exception as error:
        ours = translate_error(error, env)
        if ours is None:
            raise
        raise elect_reporter(ours, env, store) from error
    finally:
        # a failed NCCL group would wait here for the peers it lost; the process's end does without
        if dist.is_initialized() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            dist.destroy_process_group()


def release_groups() -> None:
    """Drop the groups of worlds that were left, once the models that used them are gone."""
    if _HELD:
        gc.collect()
        _HELD.clear()


def _form(env: DistEnv, store: Store, device_name: str, timeout_s: float) -> RankGroup:
    hosts = roll_call(env, store, timeout_s)
    device = _device(device_name, env)
    backend = "nccl" if device.type == "cuda" else "gloo"
    both = "cpu:gloo,cuda:nccl" if device.type == "cuda" else backend
    inner = PrefixStore("group", store)
    dist.init_process_group(both, store=inner, rank=env.rank, world_size=env.world_size)
    _HELD.append(dist.group.WORLD)
    return RankGroup(env, hosts, device, backend)


def _device(name: str, env: DistEnv) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", env.device_index(torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device
