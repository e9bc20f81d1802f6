"""A language model: predicts the next token of tokenised files, of a text byte by byte, or of a synthetic pattern.

The decoder is GPT-style: pre-norm blocks of causal attention and a four-fold MLP, tied output layer. With --model, a
causal language model of Hugging Face's transformers is read from a local folder, without a network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from hpcjobs.runtime.exits import BadData, MissingData, UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import Batch, Dataset, Score, Workload, classification_loss, classification_score
from hpcjobs.trainers.workloads.tokens import INFO_FILE, SyntheticTokens, TokensInfo, byte_windows, token_windows


@dataclass(frozen=True)
class DecoderShape:
    """The shape of a decoder; `width` is the size of its hidden states, lengths count tokens."""

    layers: int
    width: int
    heads: int
    sequence_length: int
    vocabulary: int


class Attention(nn.Module):
    """Causal self-attention: each token sees itself and the tokens before it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        output: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """The unit that sharding and activation checkpointing wrap."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        hidden: torch.Tensor = x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))
        return hidden


class Decoder(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.sequence_length, shape.width)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_small_weights)
        for block in blocks:  # keeps the residual stream's variance independent of depth
            for layer in (block.attention.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * shape.layers) ** 0.5)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def flops_per_token(shape: DecoderShape) -> float:
    """6 per weight of a matrix product (forward 2, backward 4), and 12·layers·width·length for attention."""
    weights = shape.layers * 12 * shape.width**2 + shape.vocabulary * shape.width
    return 6.0 * weights + 12.0 * shape.layers * shape.width * shape.sequence_length


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
        MissingData: the folder or transformers is missing. BadData: the folder can't be read.
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


PRESETS = {
    "tiny": DecoderShape(layers=2, width=64, heads=4, sequence_length=64, vocabulary=256),
    "small": DecoderShape(layers=4, width=256, heads=8, sequence_length=256, vocabulary=256),
    "gpt2": DecoderShape(layers=12, width=768, heads=12, sequence_length=1024, vocabulary=50304),
}
SYNTHETIC_SAMPLES = 4096
SYNTHETIC_HELD_OUT = 256
BYTES = 256


def lm(config: Config) -> Workload:
    shape = PRESETS[config.preset]
    if config.sequence_length is not None:
        shape = replace(shape, sequence_length=config.sequence_length)
    if config.text:
        shape = replace(shape, vocabulary=BYTES)
    if config.tokens:
        shape = replace(shape, vocabulary=_vocabulary(config))
    train, held_out = _data(config, shape)
    if config.model is not None:
        return _load_pretrained(Path(config.model), config, shape, train, held_out)
    return Workload(
        name="lm",
        unit="tokens",
        units_per_sample=shape.sequence_length,
        flops_per_sample=flops_per_token(shape) * shape.sequence_length,
        build_model=lambda: Decoder(shape),
        loss=classification_loss,
        evaluate=classification_score,
        train=train,
        held_out=held_out,
        batch_size=16,
        lr=1e-3,
        weight_decay=0.01,
        blocks=(Block,),
        perplexity=True,
        synthetic=None if config.text or config.tokens else lambda count: _synthetic(count, shape),
    )


def _load_pretrained(folder: Path, config: Config, shape: DecoderShape, train: Dataset, held_out: Dataset) -> Workload:
    """A model of Hugging Face in the place of the decoder."""
    vocabulary = read_vocabulary(folder)
    if not config.tokens:
        raise UsageError(
            "lm --model needs --tokens", hint="hpcjobs.trainers.data.tokenize --tokenizer DIR/tokenizer.json"
        )
    if _read_vocabulary(config) > vocabulary:
        raise UsageError(f"--tokens have {_read_vocabulary(config)} tokens, and --model {folder} has {vocabulary}")
    return Workload(
        name="lm",
        unit="tokens",
        units_per_sample=shape.sequence_length,
        build_model=lambda: build_pretrained(folder),
        loss=pretrained_loss,
        evaluate=pretrained_score,
        train=train,
        held_out=held_out,
        batch_size=8,
        lr=1e-4,
        weight_decay=0.01,
        perplexity=True,
    )


def _data(config: Config, shape: DecoderShape) -> tuple[Dataset, Dataset]:
    if config.tokens:
        parts = token_windows(config.tokens, length=shape.sequence_length)
        for part in parts:
            part.vocabulary = shape.vocabulary
        return parts
    if config.text:
        return byte_windows(config.text, length=shape.sequence_length)
    count = SYNTHETIC_SAMPLES if config.train_samples is None else config.train_samples
    return _synthetic(count, shape), _synthetic(SYNTHETIC_HELD_OUT, shape, first=count)


def _vocabulary(config: Config) -> int:
    """Rounded up to a multiple of 64 for quick matrix products."""
    return -(-_read_vocabulary(config) // 64) * 64


def _read_vocabulary(config: Config) -> int:
    """Return the vocabulary size of --tokens, from --vocabulary or tokens.json."""
    if config.text:
        raise UsageError("--text and --tokens: one of them", hint="hpcjobs.trainers.data.tokenize makes tokens of text")
    infos = [
        TokensInfo.read(folder)
        for folder in {path if path.is_dir() else path.parent for path in map(Path, config.tokens)}
    ]
    sizes = {info.vocabulary for info in infos if info is not None}
    if config.vocabulary is None and (len(sizes) != 1 or None in infos):
        problem = f"the vocabularies {sorted(sizes)}" if sizes else f"no {INFO_FILE}, which says their vocabulary"
        raise UsageError(f"--tokens: the folders have {problem}", hint="--vocabulary N")
    return config.vocabulary or sizes.pop()


def _synthetic(count: int, shape: DecoderShape, *, first: int = 0) -> SyntheticTokens:
    return SyntheticTokens(count, length=shape.sequence_length, vocabulary=shape.vocabulary, first=first)
