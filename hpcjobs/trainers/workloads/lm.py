"""A language model: predicts the next token of tokenised files, of a text byte by byte, or of a synthetic pattern.

The decoder is GPT-style: pre-norm blocks of causal attention and a four-fold MLP, tied output layer. With --model, a
causal language model of Hugging Face's transformers is read from a local folder, without a network.

Files of tokens have the layout of nanoGPT or Megatron. They are written as a stream and read as memory maps.

nanogpt    NAME.bin    tokens of 16 bits, one document after the other
megatron   NAME.bin    tokens of any integer type, one document after the other
           NAME.idx    the type, and the length and place of each document (Megatron's IndexedDataset)

A folder that `hpcjobs.trainers.data.tokenize` made also has tokens.json: vocabulary size, end-of-text token, counts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from hpcjobs.runtime.exits import BadData, MissingData, UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.workloads.base import (
    Batch,
    Dataset,
    Workload,
    classification_loss,
    classification_score,
    load_package,
    move_numbers,
)

INFO_FILE = "tokens.json"
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
CODES: dict[int, type[np.generic]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
NANOGPT_TYPE = np.uint16
Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True)
class TokensInfo:
    """The content of tokens.json: vocabulary, tokenizer, layout and counts of a folder."""

    vocabulary: int
    end_of_text: int | None
    tokenizer: str
    layout: str
    documents: int
    train_tokens: int
    held_out_tokens: int

    def write(self, folder: Path) -> None:
        (folder / INFO_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> TokensInfo | None:
        """Read tokens.json; None in a folder that another program made.

        Raises BadData: the file can't be read, or has other fields.
        """
        path = folder / INFO_FILE
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise BadData(f"{path} can't be read: {error}", hint="remove it and give --vocabulary N") from error


class TokenWriter:
    """Appends documents to NAME.bin; `close` writes the index, where the layout has one."""

    def __init__(self, name: Path, *, layout: str, dtype: type[np.generic]) -> None:
        self.name, self.layout, self.dtype = name, layout, np.dtype(dtype)
        self.lengths: list[int] = []
        self.tokens = 0
        self._file: BinaryIO = name.with_suffix(".bin").open("wb")

    def add(self, document: Sequence[int] | Tokens) -> None:
        self._file.write(np.asarray(document, dtype=self.dtype).tobytes())
        self.lengths.append(len(document))
        self.tokens += len(document)

    def close(self) -> None:
        self._file.close()
        if self.layout == "megatron":
            write_index(self.name.with_suffix(".idx"), self.lengths, self.dtype)


def write_index(path: Path, lengths: Sequence[int], dtype: np.dtype[np.generic]) -> None:
    """Write Megatron's index of contiguous documents."""
    code = next(code for code, kind in CODES.items() if np.dtype(kind) == dtype)
    sizes = np.array(lengths, dtype=np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    starts = np.concatenate([np.zeros(1, np.int64), ends])[: len(sizes)]
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, len(sizes), len(sizes) + 1))
        for array in (sizes, starts, np.arange(len(sizes) + 1, dtype=np.int64)):
            file.write(array.tobytes())


def read_index_type(path: Path) -> type[np.generic]:
    """The type of the tokens that a Megatron index describes.

    Raises BadData: it is not such an index, or has another version or type.
    """
    with path.open("rb") as file:
        head = file.read(len(MAGIC) + 9)
    if not head.startswith(MAGIC) or len(head) < len(MAGIC) + 9:
        raise BadData(f"{path} is not the index of a Megatron data set: it does not begin with {MAGIC!r}")
    version, code = struct.unpack("<QB", head[len(MAGIC) :])
    kind = CODES.get(code)
    if version != VERSION or kind is None or not np.issubdtype(kind, np.integer):
        raise BadData(f"{path} has version {version} and type {code}; version {VERSION} of integer types can be read")
    return kind


def map_tokens(path: Path) -> Tokens:
    """Return the tokens of one .bin file as a memory map: they are read on first use.

    Raises MissingData: the file does not exist. BadData: it is empty, or its size is not a multiple of the token size.
    """
    index = path.with_suffix(".idx")
    if not path.is_file():
        raise MissingData(f"--tokens {path}: no such file")
    dtype = np.dtype(read_index_type(index) if index.is_file() else NANOGPT_TYPE)
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise BadData(
            f"--tokens {path} has {size} bytes, which are not tokens of {dtype.itemsize} bytes",
            hint="without NAME.idx beside NAME.bin, tokens of 16 bits are expected",
        )
    return np.memmap(path, dtype=dtype, mode="r")


def list_token_files(paths: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """The training files and the held-out ones (`val*`, `valid*`, `held_out*`, `test*`) of folders and files."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.glob("*.bin"))
            if not inside:
                raise MissingData(f"--tokens {path}: the folder has no .bin file")
            files += inside
        else:
            files.append(path.with_suffix(".bin") if path.suffix == ".idx" else path)
    held_out = [path for path in files if path.name.startswith(("val", "held_out", "test"))]
    train = [path for path in files if path not in held_out]
    if not train:
        raise MissingData(f"--tokens {' '.join(paths)}: all files are held out by their names", hint="train*.bin")
    return train, held_out


HELD_OUT_SHARE = 20  # the last twentieth of each file


class SyntheticTokens:
    """Samples that count upward, with a start and a step per sample: learnable, endless, and made in O(1)."""

    def __init__(self, count: int, *, length: int, vocabulary: int, first: int = 0) -> None:
        self.count, self.length, self.vocabulary, self.first = count, length, vocabulary, first
        self.device = torch.device("cpu")

    def __len__(self) -> int:
        return self.count

    def on_device(self, device: torch.device) -> SyntheticTokens:
        """The same samples, made on a GPU."""
        moved = copy(self)
        moved.device = device
        return moved

    def read_batch(self, indices: Sequence[int]) -> Batch:
        index = move_numbers(indices, self.device).unsqueeze(1) + self.first
        start, stride = index * 7919 % self.vocabulary, 1 + index % 7
        tokens = (start + stride * torch.arange(self.length + 1, device=self.device)) % self.vocabulary
        return tokens[:, :-1], tokens[:, 1:]


class TokenWindows:
    """Windows of `length` tokens, each with the token after it as last target; files stay on disk, mapped.

    Window w of a file covers tokens [w·length, (w+1)·length]; windows of different files don't mix.
    """

    def __init__(self, files: Sequence[Tokens], windows: Sequence[range], *, length: int) -> None:
        self.files, self.windows, self.length = files, windows, length
        self.vocabulary: int | None = None
        """Tokens of the model; a batch with a higher number is refused."""
        self.ends = np.array(list(accumulate(len(one) for one in windows)))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read_batch(self, indices: Sequence[int]) -> Batch:
        stacked = np.stack([self._window(index) for index in indices]).astype(np.int64)
        if self.vocabulary is not None and stacked.max() >= self.vocabulary:
            raise BadData(
                f"--tokens has the token {stacked.max()}, and the model has {self.vocabulary} tokens, numbered from 0",
                hint="--vocabulary N, or the tokens of the model's own tokenizer",
            )
        tokens = torch.from_numpy(stacked)
        return tokens[:, :-1], tokens[:, 1:]

    def _window(self, index: int) -> Tokens:
        file = int(np.searchsorted(self.ends, index, side="right"))
        before = int(self.ends[file - 1]) if file else 0
        start = self.windows[file][index - before] * self.length
        return self.files[file][start : start + self.length + 1]


def token_windows(paths: Sequence[str], *, length: int) -> tuple[TokenWindows, TokenWindows]:
    """The training and held-out windows of folders and files of tokens.

    Without held-out files (val*.bin), the end of each training file is held out.
    """
    train, held_out = list_token_files(paths)
    if not held_out:
        return split_windows([_map_long_enough(path, length) for path in train], length=length)
    parts = ([_map_long_enough(path, length) for path in part] for part in (train, held_out))
    windows = [
        TokenWindows(files, [range((len(file) - 1) // length) for file in files], length=length) for files in parts
    ]
    return windows[0], windows[1]


def _map_long_enough(path: Path, length: int) -> Tokens:
    tokens = map_tokens(path)
    if len(tokens) < 2 * length + 1:
        raise BadData(
            f"--tokens {path} has {len(tokens)} tokens; two windows of {length} are the least",
            hint="longer files, or a smaller --sequence-length",
        )
    return tokens


def split_windows(files: Sequence[Tokens], *, length: int) -> tuple[TokenWindows, TokenWindows]:
    """The training windows of the files, and the held-out ones from the end of each."""
    counts = [(len(file) - 1) // length for file in files]
    held = [max(1, count // HELD_OUT_SHARE) for count in counts]
    train = [range(count - last) for count, last in zip(counts, held, strict=True)]
    rest = [range(count - last, count) for count, last in zip(counts, held, strict=True)]
    return TokenWindows(files, train, length=length), TokenWindows(files, rest, length=length)


def _map_file(path: Path, length: int) -> Tokens:
    if not path.is_file():
        raise MissingData(f"--text {path}: no such file")
    if path.stat().st_size < 2 * length + 1:
        raise BadData(
            f"--text {path} has {path.stat().st_size} bytes; two windows of {length} are the least",
            hint="a longer text, or a smaller --sequence-length",
        )
    return np.memmap(path, dtype=np.uint8, mode="r")


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
    transformers = load_package("transformers", "--model", package="transformers", extra="huggingface")
    transformers.utils.logging.disable_progress_bar()  # of every rank, into the log
    return transformers


def read_vocabulary(folder: Path) -> int:
    """The number of tokens in the model's vocabulary.

    Raises MissingData: the folder or transformers is missing. BadData: the folder can't be read.
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


def logits_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model of transformers, called as one that returns its logits."""
    return lambda tokens: model(input_ids=tokens).logits


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
        shape = replace(shape, vocabulary=-(-_read_vocabulary(config) // 64) * 64)  # for quick matrix products
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
        loss=lambda model, batch: classification_loss(logits_of(model), batch),
        evaluate=lambda model, batch: classification_score(logits_of(model), batch),
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
        texts = [_map_file(Path(path), shape.sequence_length) for path in config.text]
        return split_windows(texts, length=shape.sequence_length)
    count = SYNTHETIC_SAMPLES if config.train_samples is None else config.train_samples
    return _synthetic(count, shape), _synthetic(SYNTHETIC_HELD_OUT, shape, first=count)


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
