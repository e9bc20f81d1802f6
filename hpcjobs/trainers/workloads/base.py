"""A workload: the model, its data, and everything a strategy needs to know about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

Batch = Any
"""Tensors whose first dimension counts samples: one tensor, or a tuple, list or mapping of them, nested as you like."""

Metrics = Mapping[str, torch.Tensor]


class BatchDataset(Protocol):
    """Samples by number, which it reads and collates a batch at a time."""

    def __len__(self) -> int: ...

    def read_batch(self, indices: Sequence[int]) -> Batch: ...


class MapDataset(Protocol):
    """torch's map-style `Dataset`, a list, or anything else with samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Dataset = BatchDataset | MapDataset | Iterable[Any]
"""What a workload may train on; the last one is torch's `IterableDataset`, with or without a length."""


@dataclass(frozen=True)
class Score:
    """Sums over a batch of the held-out part: `tensor` is [loss sum, correct, predictions] (correct may be NaN).

    `metrics` are further sums over the batch; the evaluation reports each divided by the predictions.
    """

    tensor: torch.Tensor
    metrics: Metrics = field(default_factory=dict)


Loss = Callable[[Any, Batch], "torch.Tensor | tuple[torch.Tensor, Metrics]"]
"""From the model and a batch to the mean loss over the batch; with metrics of the batch as scalars, if it has some."""

OptimizerFactory = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
"""From parameter groups, as torch's optimizers take them, and the learning rate to an optimizer."""

Schedule = Callable[[int, int], float]
"""From a step and the number of steps, both counted after the warm-up, to the factor of the learning rate."""


@dataclass(frozen=True)
class ParameterGroup:
    """How the optimizer treats a parameter; parameters with equal values form one group."""

    lr_scale: float = 1.0
    weight_decay: float | None = None  # None: the workload's own


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`build_model`, `loss` and `train` are required; all other fields have a default."""

    build_model: Callable[[], nn.Module]
    loss: Loss
    train: Any  # Dataset
    held_out: Any = None  # BatchDataset | MapDataset | None
    evaluate: Callable[[Any, Batch], Score] | None = None  # None: the loss of the held-out part
    collate: Callable[[list[Any]], Batch] | None = None  # from samples to a batch; None: torch's default_collate
    name: str = ""  # "": the name of the function that makes the workload
    unit: str = "samples"  # what throughput counts: "images", "tokens"
    units_per_sample: float = 1.0
    flops_per_sample: float | None = None  # of forward and backward together, counted as docs/trainers.md says
    # defaults, for what the command line leaves open
    batch_size: int = 32
    lr: float = 1e-3
    epochs: int = 1
    optimizer: str | OptimizerFactory = "adamw"
    weight_decay: float = 0.0
    parameter_group: Callable[[str, nn.Parameter], ParameterGroup] | None = None  # by name and parameter
    schedule: Schedule | None = None  # None: --lr-schedule
    blocks: tuple[type[nn.Module], ...] = ()  # the modules that sharding takes one at a time
    perplexity: bool = False  # evaluation also gives exp(loss)
    synthetic: Callable[[int], BatchDataset] | None = None  # training data made up on the spot, of any length
    convolutions: bool = False  # of inputs of one shape: cuDNN may try its algorithms and keep the quickest

    @property
    def train_length(self) -> int | None:
        """Samples of the training data; None where it does not know."""
        return measure_length(self.train)


def measure_length(dataset: Any) -> int | None:
    """The number of samples; None for a dataset that does not know it."""
    try:
        return len(dataset)
    except TypeError:  # no __len__, or one that refuses, as an IterableDataset may have
        return None


def classification_loss(
    model: Callable[[torch.Tensor], torch.Tensor], batch: Batch, *, smoothing: float = 0.0
) -> torch.Tensor:
    """Cross entropy in fp32, mean over every prediction; logits may have more than two dimensions."""
    inputs, targets = batch
    logits = model(inputs).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)


def smoothed_loss(smoothing: float) -> Loss:
    """The loss with a share of each target spread evenly over all classes."""
    return partial(classification_loss, smoothing=smoothing)


def classification_score(model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Score:
    inputs, targets = batch
    logits, labels = model(inputs).flatten(0, -2).float(), targets.flatten()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(-1) == labels).sum()
    count = torch.tensor(float(labels.numel()), device=loss.device)
    return Score(torch.stack([loss.double(), correct.double(), count.double()]))
