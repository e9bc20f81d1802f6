"""A language model: predicts the next byte of a text in any script, or of a synthetic pattern."""

from __future__ import annotations

from dataclasses import replace

from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.workloads.base import Dataset, Workload, classification_loss, classification_score
from hpcjobs.trainers.workloads.decoder import Block, Decoder, DecoderShape, flops_per_token
from hpcjobs.trainers.workloads.tokens import SyntheticTokens, byte_windows

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
    train, held_out = _data(config, shape)
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
        synthetic=None if config.text else lambda count: _synthetic(count, shape),
    )


def _data(config: Config, shape: DecoderShape) -> tuple[Dataset, Dataset]:
    if config.text:
        return byte_windows(config.text, length=shape.sequence_length)
    count = SYNTHETIC_SAMPLES if config.train_samples is None else config.train_samples
    return _synthetic(count, shape), _synthetic(SYNTHETIC_HELD_OUT, shape, first=count)


def _synthetic(count: int, shape: DecoderShape, *, first: int = 0) -> SyntheticTokens:
    return SyntheticTokens(count, length=shape.sequence_length, vocabulary=shape.vocabulary, first=first)
