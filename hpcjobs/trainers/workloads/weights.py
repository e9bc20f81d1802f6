"""Weights in safetensors files: written from a model's tensors by name, and read into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from hpcjobs.runtime.exits import BadData, MissingData

SHOWN_NAMES = 3


def load_safetensors() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingData("safetensors files need the package safetensors", hint="pip install safetensors") from error
    return safetensors


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

    Raises:
        MissingData: no file exists. BadData: a file can't be read.
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

    Raises:
        MissingData: no file exists.
        BadData: a file can't be read, or a tensor is missing, unexpected or of another shape.
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
