"""A language model: predicts the next token of tokenised files, of a text byte by byte, or of a synthetic pattern."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import Dataset, Workload, classification_loss, classification_score
from hpcjobs.trainers.workloads.decoder import Block, Decoder, DecoderShape, flops_per_token
from hpcjobs.trainers.workloads.pretrained import build_pretrained, pretrained_loss, pretrained_score, read_vocabulary
from hpcjobs.trainers.workloads.token_files import INFO_FILE, TokensInfo
from hpcjobs.trainers.workloads.tokens import SyntheticTokens, byte_windows, token_windows

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
    """Of --tokens: what --vocabulary or tokens.json says."""
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
