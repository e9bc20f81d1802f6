"""Causal language models of Hugging Face's transformers, from a local folder: nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.workloads.base import Batch, Score, classification_loss, classification_score


def load_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingData(
            "--model needs the package transformers", hint="pip install 'hpcjobs[huggingface]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()  # of every rank, into the log
    return transformers


def read_vocabulary(folder: Path) -> int:
    """The number of tokens in the model's vocabulary.

    Raises:
        MissingData, BadData: there is no model.
    """
    if not (folder / "config.json").is_file():
        raise MissingData(f"--model {folder} has no config.json", hint="a folder that save_pretrained wrote")
    try:
        settings = load_transformers().AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadData(f"--model {folder} can't be read: {error}") from error
    return int(settings.get_text_config().vocab_size)


def build_pretrained(folder: Path) -> nn.Module:
    """The model with its weights; on the meta device its shapes alone."""
    transformers = load_transformers()
    settings = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    kind = transformers.AutoModelForCausalLM
    if torch.get_default_device().type == "meta":
        model = kind.from_config(settings, dtype=torch.float32)
    else:
        model = kind.from_pretrained(str(folder), local_files_only=True, dtype=torch.float32)
    model.config.use_cache = False
    trained: nn.Module = model.train()
    return trained


class _Logits:
    """A model of transformers, called as one that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=tokens).logits
        return logits


def pretrained_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return classification_loss(_Logits(model), batch)


def pretrained_score(model: nn.Module, batch: Batch) -> Score:
    return classification_score(_Logits(model), batch)
