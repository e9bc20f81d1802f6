"""Weights in safetensors files, and low-rank adapters (LoRA, Hu et al. 2021), by the package peft.

Weights are written from a model's tensors by name, and read into a model. Where a model has adapters, only they are
trained, and only they are saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcjobs.runtime.exits import BadCheckpoint, BadData, MissingData, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.strategies import blocks_of, choose_blocks
from hpcjobs.trainers.workloads.base import Workload, load_package

SHOWN_NAMES = 3


def load_safetensors() -> Any:
    """Load safetensors with its part for torch. Raises MissingData."""
    load_package("safetensors.torch", "a safetensors file", package="safetensors", extra="safetensors")
    return import_module("safetensors")


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a temporary file and rename it. Tensors that share memory (tied weights) are written for each name."""
    package = load_safetensors()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        plain = torch.contiguous_format
        copies = {name: tensor.detach().cpu().clone(memory_format=plain) for name, tensor in tensors.items()}
        package.torch.save_file(copies, beside, metadata={"format": "pt", **metadata})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_weights(source: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or of all such files in a folder.

    Raises MissingData: no file exists. BadData: a file can't be read.
    """
    package = load_safetensors()
    tensors: dict[str, torch.Tensor] = {}
    try:
        for path in list_weight_files(source, option="--base"):
            tensors |= package.torch.load_file(path)
    except (OSError, package.SafetensorError) as error:
        raise BadData(f"--base {source} can't be read: {error}") from error
    return tensors


def list_weight_files(source: Path, *, option: str) -> list[Path]:
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if not files or not files[0].is_file():
        raise MissingData(f"{option} {source}: no such .safetensors file")
    return files


@torch.no_grad()
def load_weights(model: nn.Module, source: Path) -> None:
    """Copy the tensors of a safetensors file, or of all such files in a folder, into a model of the same names.

    Tensors are read one at a time, and cast to the model's type.

    Raises MissingData: no file exists. BadData: a file can't be read, or a tensor is missing, unexpected or of another
    shape.
    """
    package = load_safetensors()
    files = list_weight_files(source, option="--init-from")
    targets = {
        name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    seen: set[str] = set()
    for path in files:
        try:
            with package.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    seen.add(name)
                    if name not in targets:
                        continue
                    tensor, target = file.get_tensor(name), targets[name]
                    if tensor.shape != target.shape:
                        shapes = f"the shape {tuple(tensor.shape)}, and {tuple(target.shape)} in the model"
                        raise BadData(f"--init-from {path}: {name} has {shapes}")
                    target.copy_(tensor)
        except (OSError, package.SafetensorError) as error:
            raise BadData(f"--init-from {path} can't be read: {error}") from error
    tied = _list_tied(targets, seen)
    for names, problem in (
        (targets.keys() - seen - tied, "lacks"),
        (seen - targets.keys(), "has, and the model has not,"),
    ):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
            raise BadData(
                f"--init-from {source} {problem} {len(names)} tensors: {shown}", hint="is it of the same model?"
            )


def _list_tied(targets: Mapping[str, torch.Tensor], seen: set[str]) -> set[str]:
    """Return the names that share memory with a tensor filled under another name."""
    filled = {targets[name].data_ptr() for name in seen & targets.keys()}
    return {name for name, tensor in targets.items() if tensor.numel() and tensor.data_ptr() in filled}


NAME = "default"  # peft's, for a model with one adapter
DOWN, UP = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"


@dataclass(frozen=True)
class Adapters:
    """The settings of a checkpoint's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str | None
    """Path of the frozen weights: a safetensors file, or a folder of such."""
    transposed: tuple[str, ...] = ()
    """Adapted layers with weights of input × output, as in GPT-2."""

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Adapters | None:
        """Read the settings from a checkpoint's state; None if all weights were trained."""
        saved = state.get("adapters")
        if saved is None:
            return None
        names = {key: tuple(saved[key]) for key in ("targets", "transposed")}
        return cls(saved["rank"], saved["alpha"], names["targets"], saved["base"], names["transposed"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def add_adapters(model: nn.Module, workload: Workload, config: Config, group: RankGroup) -> Adapters:
    """Add adapters to layers of the model, and freeze all other weights. The product of a new adapter is zero.

    Raises UsageError: the layers do not exist, or a shipped workload reads no weights from a file.
    """
    assert config.lora is not None
    base = config.model if config.init_from is None else config.init_from
    if base is None and ":" not in config.workload:
        raise UsageError("--lora adapts weights that were trained before", hint="--init-from PATH, or lm --model DIR")
    targets = config.lora_targets or list_targets(model, workload, group)
    alpha = 2.0 * config.lora if config.lora_alpha is None else config.lora_alpha
    peft = load_package("peft", "--lora", package="peft", extra="huggingface")
    transposed = any(_is_transposed(module) for module in model.modules())
    settings = peft.LoraConfig(
        r=config.lora, lora_alpha=alpha, target_modules=list(targets), lora_dropout=0.0, fan_in_fan_out=transposed
    )
    try:
        peft.inject_adapter_in_model(settings, model, adapter_name=NAME)
    except ValueError as error:
        raise UsageError(f"--lora: {error}", hint="--lora-targets names layers of the model") from error
    names = [name for name, module in model.named_modules() if _is_transposed(getattr(module, "base_layer", None))]
    return Adapters(
        config.lora, alpha, tuple(targets), None if base is None else str(Path(base).resolve()), tuple(names)
    )


def list_targets(model: nn.Module, workload: Workload, group: RankGroup) -> tuple[str, ...]:
    """The last parts of the names of all linear layers in blocks."""
    blocks = blocks_of(model, choose_blocks(model, workload, group))
    names = {
        name.rpartition(".")[2]
        for block in blocks
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) or _is_transposed(module)
    }
    if not names:
        raise UsageError("--lora: the model has no blocks with linear layers", hint="--lora-targets NAME ...")
    return tuple(sorted(names))


def _is_transposed(module: object) -> bool:
    """Whether this is the linear layer of transformers with a weight of input × output."""
    return type(module).__name__ == "Conv1D"


def list_saved(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors in a checkpoint: trained weights and buffers."""
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    return frozenset(model.state_dict().keys() - frozen)


def merge(
    base: Mapping[str, torch.Tensor], trained: Mapping[str, torch.Tensor], adapters: Adapters
) -> dict[str, torch.Tensor]:
    """The base's tensors, with the products of the adapters added.

    Raises BadData: the base has no weight for an adapter.
    """
    merged = dict(base)
    for name in [name.removesuffix(DOWN) for name in trained if name.endswith(DOWN)]:
        target = _find_weight(f"{name}.weight", merged)
        change = trained[name + UP].double() @ trained[name + DOWN].double() * (adapters.alpha / adapters.rank)
        change = change.T if name in adapters.transposed else change
        if change.shape != merged[target].shape:
            raise BadData(
                f"{target} of the base has the shape {tuple(merged[target].shape)}, its adapter {tuple(change.shape)}"
            )
        merged[target] = (merged[target].double() + change).to(merged[target].dtype)
    return merged


def _find_weight(name: str, base: Mapping[str, torch.Tensor]) -> str:
    """The base's own name, which may lack the first parts."""
    while name:
        if name in base:
            return name
        name = name.partition(".")[2]
    raise BadData("the base lacks a weight that an adapter changes", hint="is it the model that was adapted?")


def write_adapters(folder: Path, trained: Mapping[str, torch.Tensor], adapters: Adapters) -> None:
    """A folder that peft's `PeftModel.from_pretrained(model, FOLDER)` reads."""
    tensors = {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": tensor
        for name, tensor in trained.items()
        if name.endswith((DOWN, UP))
    }
    if not tensors:
        raise BadCheckpoint("the checkpoint has no adapters")
    peft = load_package("peft", "--lora", package="peft", extra="huggingface")
    settings = peft.LoraConfig(
        r=adapters.rank, lora_alpha=adapters.alpha, target_modules=list(adapters.targets), lora_dropout=0.0,
        fan_in_fan_out=bool(adapters.transposed), base_model_name_or_path=adapters.base, inference_mode=True,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(str(folder))
    write_weights(folder / "adapter_model.safetensors", tensors, {})
