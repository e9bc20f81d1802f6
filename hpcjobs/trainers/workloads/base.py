"""Workloads: the model, its data, batches and parameter groups, and checks of the values that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hpcjobs.runtime.exits import BadData, MissingData, UsageError


def load_package(module: str, use: str, *, package: str, extra: str) -> Any:
    """Import a module of a package that only some runs need.

    Raises MissingData: the package is missing; the message says what `use` needs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingData(f"{use} needs the package {package}", hint=f"pip install 'hpcjobs[{extra}]'") from error


Batch = Any
"""Tensors with samples as first dimension: one tensor, or a tuple, list or mapping of them, nested as you like."""

Metrics = Mapping[str, torch.Tensor]


class BatchDataset(Protocol):
    """Samples by number, which it reads and collates a batch at a time."""

    def __len__(self) -> int: ...

    def read_batch(self, indices: Sequence[int]) -> Batch: ...


class MapDataset(Protocol):
    """torch's map-style `Dataset`, a list, or any other object with samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Dataset = BatchDataset | MapDataset | Iterable[Any]
"""Training data of a workload; the last kind is torch's `IterableDataset`, with or without a length."""


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
    unit: str = "samples"  # the unit of throughput, such as "images" or "tokens"
    units_per_sample: float = 1.0
    flops_per_sample: float | None = None  # of forward and backward together, counted as docs/trainers.md says
    # defaults for flags that are not given
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
    """Cross entropy in fp32, mean over every prediction; logits may have more than two dimensions.

    `smoothing` is the share of each target that is spread evenly over all classes.
    """
    inputs, targets = batch
    logits = model(inputs).float()
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), label_smoothing=smoothing)


def classification_score(model: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> Score:
    inputs, targets = batch
    logits, labels = model(inputs).flatten(0, -2).float(), targets.flatten()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    correct = (logits.argmax(-1) == labels).sum()
    count = torch.tensor(float(labels.numel()), device=loss.device)
    return Score(torch.stack([loss.double(), correct.double(), count.double()]))


def count_samples(batch: Batch) -> int:
    """The length of the first dimension, which all tensors of a batch share."""
    lengths = {len(tensor) for tensor in _tensors(batch) if tensor.dim() > 0}
    if len(lengths) != 1:
        shapes = [tuple(tensor.shape) for tensor in _tensors(batch)]
        raise BadData(
            f"a batch has tensors of shapes {shapes}, but the first dimension of each must count its samples",
            hint="`collate` of the workload makes a batch from a list of samples",
        )
    return lengths.pop()


def slice_batch(batch: Batch, start: int, stop: int) -> Batch:
    """Samples `start` to `stop` of a batch, in a batch of the same structure; a list without tensors, such as
    `default_collate` makes of strings, has one item per sample too."""
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() > 0 else batch
    if isinstance(batch, list) and not _tensors(batch):
        return batch[start:stop]
    return map_parts(batch, lambda part: slice_batch(part, start, stop))


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A batch of the same structure, with each of its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return map_parts(batch, lambda part: map_tensors(part, change))


def map_parts(batch: Batch, change: Callable[[Batch], Any]) -> Any:
    """A batch of the same structure, with each of its direct parts changed."""
    if isinstance(batch, Mapping):
        return {name: change(part) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(change, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(change, batch))
    return batch


def move_numbers(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers of samples on the device, from pinned memory: other copies wait for all that a GPU has been given."""
    tensor = torch.as_tensor(numbers)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    return [tensor for part in parts for tensor in _tensors(part)] if isinstance(parts, list | tuple) else []


def split_loss(result: Any, workload: Workload) -> tuple[torch.Tensor, Metrics]:
    """Return the loss and the metrics. Raises UsageError: one of them is not a tensor of one number."""
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    _refuse_other_than_scalar(loss, f"the loss of the workload {workload.name}")
    if not metrics:
        return loss, {}
    for name, value in metrics.items():
        _refuse_other_than_scalar(value, f"the metric {name} of the workload {workload.name}")
    return loss, metrics


def _refuse_other_than_scalar(value: Any, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"{what} is a {type(value).__name__}, expected a tensor of one number")
    if value.numel() != 1:
        raise UsageError(f"{what} has the shape {tuple(value.shape)}, expected one number", hint=".mean()")


GroupedParameters = list[tuple[ParameterGroup, list[nn.Parameter]]]


def group_parameters(named: Iterable[tuple[str, nn.Parameter]], workload: Workload) -> GroupedParameters:
    """Return the parameters by the workload's groups; the order is by the first parameter of each group."""
    groups: dict[ParameterGroup, list[nn.Parameter]] = {}
    for name, parameter in named:
        group = ParameterGroup() if workload.parameter_group is None else workload.parameter_group(name, parameter)
        if not isinstance(group, ParameterGroup):
            raise UsageError(f"`parameter_group` of the workload returned {group!r} for {name}, not a ParameterGroup")
        groups.setdefault(group, []).append(parameter)
    return list(groups.items())


def order_names(model: nn.Module, workload: Workload) -> list[str]:
    """Return the names of a model's parameters in the optimizer's order."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = group_parameters(model.named_parameters(), workload)
    return [names[parameter] for _, parameters in groups for parameter in parameters]


SAVED_FILES = ("dataset_dict.json", "state.json")
HELD_OUT_SPLITS = ("validation", "test")


def is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED_FILES)


def open_saved_dataset(folder: Path, *, option: str) -> Any:
    """A Dataset, or a DatasetDict: splits by name.

    Raises MissingData, BadData: the package is missing, or the folder can't be read.
    """
    datasets = load_package("datasets", f"{option} {folder}", package="datasets", extra="huggingface")
    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise BadData(f"{option} {folder} can't be read as a saved dataset: {error}") from error


def load_saved_dataset(folder: Path, *, option: str, columns: Sequence[str], held_out_every: int) -> tuple[Any, Any]:
    """Return the splits `train` and `validation` (or `test`) of a saved dataset.

    Without a held-out split, every `held_out_every`-th row is held out.

    Raises MissingData, BadData: as `open_saved_dataset`, or a split or a column is missing.
    """
    loaded, held = open_saved_dataset(folder, option=option), None
    if hasattr(loaded, "values"):
        held_name = next((name for name in HELD_OUT_SPLITS if name in loaded), None)
        if "train" not in loaded:
            raise MissingData(f"{option} {folder} has the splits {', '.join(loaded)}, and no train")
        loaded, held = loaded["train"], None if held_name is None else loaded[held_name]
    missing = [name for name in columns if name not in loaded.column_names]
    if missing:
        raise BadData(f"{option} {folder} has the columns {', '.join(loaded.column_names)}, and no {missing[0]}")
    if held is None:
        numbers = range(len(loaded))
        held = loaded.select([n for n in numbers if (n + 1) % held_out_every == 0])
        loaded = loaded.select([n for n in numbers if (n + 1) % held_out_every])
    if not len(loaded) or not len(held):
        raise MissingData(f"{option} {folder}: {len(loaded)} rows to train on, {len(held)} held out")
    return loaded, held
