"""Workloads to which something happens at a step: to rank 1, or to the storage."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from worlds import Points, noisy_points

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import Batch, Workload


def _at_each_step(config: Config, happens: Callable[[int], None]) -> Workload:
    workload, count = noisy_points(config), iter(range(1, 10**6))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        happens(next(count))
        return workload.loss(model, batch)

    return replace(workload, loss=loss)


def stop_requested(config: Config) -> Workload:
    """Rank 1 is told to stop in the step of this start that ASKED_AT says."""

    def happens(step: int) -> None:
        if os.environ["RANK"] == "1" and step == int(os.environ.get("ASKED_AT", "0")):
            os.kill(os.getpid(), getattr(signal, os.environ.get("ASKED_BY", "SIGUSR1")))

    return _at_each_step(config, happens)


def stuck(config: Config) -> Workload:
    """Rank 1 does not come to the gradients of its twelfth loss."""

    def happens(step: int) -> None:
        if os.environ["RANK"] == "1" and step == 12:
            time.sleep(600)

    return _at_each_step(config, happens)


def paced(config: Config) -> Workload:
    """A step takes 50 ms, the twelfth SLOW_S seconds."""

    def happens(step: int) -> None:
        time.sleep(float(os.environ.get("SLOW_S", "0.05")) if step == 12 else 0.05)

    return _at_each_step(config, happens)


class Hanging(Points):
    """Its data does not come any more, on rank 1."""

    queries = 0

    def read_batch(self, indices: object) -> Batch:
        self.queries += 1
        if os.environ["RANK"] == "1" and self.queries == 12:
            time.sleep(600)
        return super().read_batch(indices)  # type: ignore[arg-type]


def hanging(config: Config) -> Workload:
    return replace(noisy_points(config), train=Hanging(64))


def vanishing(config: Config) -> Workload:
    """The folder of checkpoints is away from step 20 on; back at step 40, where the storage recovers."""
    folder = Path(os.environ["HPCJOBS_RUN_DIR"]) / "checkpoints"
    away = folder.with_name("away")

    def happens(step: int) -> None:
        if os.environ["RANK"] == "0" and step == 20:
            while not (folder / "latest").exists() or list(folder.glob(".step-*")):  # one is being written
                time.sleep(0.01)
            folder.rename(away)
            folder.touch()
        if os.environ["RANK"] == "0" and step == 40 and os.environ["RECOVERS"] == "yes":
            folder.unlink()
            away.rename(folder)

    return _at_each_step(config, happens)


def vanishing_then_nan(config: Config) -> Workload:
    """As `vanishing`; the loss of step 44 is NaN."""
    workload, count = vanishing(config), iter(range(1, 10**6))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return workload.loss(model, batch) * (math.nan if next(count) == 44 else 1.0)

    return replace(workload, loss=loss)


def counted(config: Config) -> Workload:
    """Bytes and calls of collectives on whole tensors, from step 6 to step 7, into counted.json."""
    seen = [0, 0]

    def counting(collective: Callable[..., object], complete: int) -> Callable[..., object]:
        def call(*tensors: torch.Tensor, **named: torch.Tensor) -> object:
            tensor = (*tensors, named.get("output"), named.get("input"))[complete]
            assert tensor is not None
            seen[0] += tensor.numel() * tensor.element_size()
            seen[1] += 1
            return collective(*tensors, **named)

        return call

    for name, complete in (("all_gather_single", 0), ("reduce_scatter_single", 1)):
        setattr(dist, name, counting(getattr(dist, name), complete))

    def happens(step: int) -> None:
        if step == 6:
            seen[:] = [0, 0]
        if step == 7 and os.environ["RANK"] == "0":
            Path(os.environ["HPCJOBS_RUN_DIR"], "counted.json").write_text(json.dumps(seen), encoding="utf-8")

    return replace(_at_each_step(config, happens), blocks=(nn.Linear,))


def failing(config: Config) -> Workload:
    """The change of a file in the run folder whose number is FAILS_AT fails with the error FAILS, or is a kill."""
    folder, left = os.environ["HPCJOBS_RUN_DIR"], int(os.environ["FAILS_AT"])

    def fail(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        changes = event in ("os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        )
        if not changes or not any(str(argument).startswith(f"{folder}/") for argument in arguments[:2]):
            return
        left -= 1
        if left == 0 and os.environ["FAILS"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if left == 0:
            number = getattr(errno, os.environ["FAILS"])
            print(f"fails: {event} {arguments[0]}", flush=True)
            raise OSError(number, os.strerror(number), str(arguments[0]))

    sys.addaudithook(fail)
    return noisy_points(config)
