"""The flags of every trainer, and the check of a command line where the job is submitted, without torch.

None means "not given": the workload's own default is used.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from typing import Any

from hpcjobs.runtime.tracking import TRACKERS
from hpcjobs.trainers.commandline.flags import (
    Parser,
    StepRange,
    add_flags,
    flag,
    not_negative,
    parse_all,
    parse_step_range,
    positive,
)


@dataclass(frozen=True)
class Config:
    """The flags of every trainer; None is the default of the workload."""

    workload: str = flag("mnist", "lm, matmul, mnist, resnet50, or a function of your own as `package.module:function`")
    epochs: int | None = flag(None, "passes over the training data", parse=positive(int), metavar="N")
    steps: int | None = flag(None, "stop after so many optimizer steps", parse=positive(int), metavar="N")
    batch_size: int | None = flag(None, "samples per rank and forward pass", parse=positive(int), metavar="N")
    accumulate: int = flag(1, "forward passes per optimizer step", parse=positive(int), metavar="N")
    lr: float | None = flag(None, "learning rate before scaling", parse=positive(float))
    lr_scaling: str = flag(
        "none", "multiply the rate by the world size, its root, or 1", choices=("none", "sqrt", "linear")
    )
    lr_schedule: str | None = flag(
        None,
        "of the rate after the warm-up; wsd is constant, and linear over the last fifth [the workload's own, constant]",
        choices=("constant", "cosine", "linear", "wsd"),
    )
    lr_final: float = flag(0.1, "share of the rate at the last step of a schedule", parse=not_negative(float))
    warmup_steps: int | None = flag(
        None,
        "steps over which the rate rises from near 0 [a tenth of the run where the rate is above the workload's own]",
        parse=not_negative(int),
        metavar="N",
    )
    optimizer: str | None = flag(None, "[the workload's own, adamw]", choices=("adafactor", "adamw", "sgd"))
    betas: tuple[float, ...] = flag((), "two, of adamw [0.9 0.999]", parse=not_negative(float), metavar="BETA")
    eps: float | None = flag(None, "of adamw [1e-08]", parse=positive(float))
    momentum: float | None = flag(None, "of sgd [0.9]", parse=not_negative(float))
    weight_decay: float | None = flag(None, "decoupled in adamw [the workload's own]", parse=not_negative(float))
    decay_norms: bool = flag(True, "weight decay also of norms and biases: of parameters of one dimension")
    ema: float | None = flag(
        None, "evaluate an exponential moving average of the weights, with this decay per step", parse=positive(float)
    )
    gradient_norm: bool = flag(False, "record the norm of the gradient, as --clip-norm does")
    clip_norm: float | None = flag(None, "largest norm of the gradient", parse=positive(float))
    seed: int = flag(0, "of the weights and of the order of samples", parse=int)
    precision: str = flag("fp32", "bf16 and fp16 are mixed precision", choices=("fp32", "bf16", "fp16"))
    tf32: bool = flag(False, "TF32 matrix products and convolutions on GPUs that have them, with --precision fp32")
    deterministic: bool = flag(False, "refuse operations whose result may differ from run to run")
    device: str = flag("auto", "auto takes a GPU where torch sees one", choices=("auto", "cpu", "cuda"))
    compile: bool = flag(False, "torch.compile the model")
    compile_blocks: bool = flag(False, "torch.compile each block by itself: once for all that are alike")
    activation_checkpointing: bool = flag(False, "compute each block's forward pass again in the backward: less memory")
    sync_batchnorm: bool = flag(False, "BatchNorm's statistics are of the batches of all ranks")
    workers: int | None = flag(
        None,
        "loader processes per rank, for the whole run; as many again for evaluation "
        "[with a GPU the rank's cores less one, at most 8; else 0]",
        parse=not_negative(int),
        metavar="N",
    )
    log_every: int = flag(10, "steps between two lines of metrics", parse=positive(int), metavar="N")
    eval_every: int | None = flag(
        None,
        "steps between evaluations of the held-out part; 0: none [after each epoch]",
        parse=not_negative(int),
        metavar="N",
    )
    eval_batches: int | None = flag(None, "batches per rank and evaluation [all]", parse=positive(int), metavar="N")
    checkpoint_every: int | None = flag(None, "steps between checkpoints", parse=positive(int), metavar="N")
    save_every_epochs: int | None = flag(None, "epochs between checkpoints", parse=positive(int), metavar="N")
    checkpoint_keep: int = flag(3, "newest checkpoints kept; the best stays too", parse=positive(int), metavar="N")
    checkpoint_async: bool = flag(True, "write checkpoints while training goes on")
    init_from: str | None = flag(
        None, "begin with these weights: a .safetensors file, or a folder of such", metavar="PATH"
    )
    lora: int | None = flag(
        None, "train low-rank adapters of this rank; all other weights are frozen", parse=positive(int), metavar="RANK"
    )
    lora_alpha: float | None = flag(
        None, "scale of adapters, divided by their rank [twice the rank]", parse=positive(float)
    )
    lora_targets: tuple[str, ...] = flag(
        (), "last parts of the names of layers to adapt [all linear ones of the blocks]", metavar="NAME"
    )
    resume: str = flag(
        "auto",
        "auto: from the run folder's newest sound checkpoint; none, or a folder: where the first attempt begins",
    )
    probe_every: int = flag(
        250, "steps between two measurements of exposed communication", parse=positive(int), metavar="N"
    )
    probe: bool = flag(True, "measure exposed communication, on passes that do not train")
    monitor: bool = flag(False, "each second, what cores, memory, network and GPUs do, into monitor.jsonl")
    profile: StepRange | None = flag(  # noqa: RUF009 (a field, as the others)
        None,
        "profile the steps after START up to STOP: a trace per rank, and the costliest operators in the log",
        parse=parse_step_range,
        metavar="START:STOP",
    )
    memory_snapshot: bool = flag(False, "record the allocations on each GPU, for pytorch.org/memory_viz")
    stall_after: float | None = flag(
        None,
        "end the run after so many seconds without a step [30 times the p95 step, of several ranks or with --retries]",
        parse=positive(float),
        metavar="S",
    )
    log_to: tuple[str, ...] = flag(
        (), "copy metrics to these programs, without a network into the run folder", choices=TRACKERS, metavar="PROGRAM"
    )
    run_dir: str | None = flag(None, "folder for metrics, summary, checkpoints", metavar="DIR")
    rendezvous_timeout_s: float = flag(60.0, "wait so long for all ranks", parse=positive(float))
    stage_to: str | None = flag(
        None, "copy --data, --text and --tokens once per node to this local folder", metavar="DIR"
    )
    # for workloads
    data: str | None = flag(
        None,
        "mnist: folder with the idx files; resnet50: with train/CLASS/* and val/CLASS/*, with WebDataset's *.tar, "
        "or saved by Hugging Face's datasets",
        metavar="DIR",
    )
    text: tuple[str, ...] = flag((), "lm: train on these files, byte by byte, with 256 tokens", metavar="FILE")
    tokens: tuple[str, ...] = flag(
        (), "lm: train on these folders or .bin files of tokens, of nanoGPT's or Megatron's layout", metavar="PATH"
    )
    vocabulary: int | None = flag(
        None, "lm: tokens that --tokens has [what its tokens.json says]", parse=positive(int), metavar="N"
    )
    model: str | None = flag(
        None, "lm: train this model of Hugging Face's transformers, from a local folder", metavar="DIR"
    )
    preset: str = flag("tiny", "lm: size of the decoder", choices=("tiny", "small", "gpt2"))
    sequence_length: int | None = flag(None, "lm: tokens per sample", parse=positive(int), metavar="N")
    train_samples: int | None = flag(
        None,
        "synthetic data: samples per epoch [enough for 32 steps, and at least the workload's own number]",
        parse=positive(int),
        metavar="N",
    )
    image_size: int = flag(224, "resnet50: side of an image in pixels", parse=positive(int), metavar="N")
    augment: bool = flag(True, "resnet50: train on random parts of the images of --data, mirrored half the time")
    label_smoothing: float = flag(
        0.0, "resnet50: share of each target that is spread over all classes", parse=not_negative(float)
    )
    channels_last: bool = flag(True, "resnet50: the channels of a pixel lie side by side in memory")
    matrix_size: int | None = flag(
        None, "matmul: rows and columns [2048, on a GPU 8192]", parse=positive(int), metavar="N"
    )


def check_arguments(trainer: str, argv: Sequence[str]) -> str:
    """Parse ``argv`` as ``trainer`` will, and return the name of the workload.

    A user's own workload is not imported, so unknown arguments pass: they may be its flags.

    Raises:
        UnknownFlagError: a flag is unknown. UsageError: a flag has an invalid value.
    """
    arguments = [arg for arg in argv if arg not in ("-h", "--help")]
    parser = _parser(trainer)
    parsed, unknown = parser.parse_known_args(arguments)
    workload: str = parsed.workload
    if unknown and ":" not in workload:
        parse_all(parser, arguments)
    return workload


def flag_names(trainer: str) -> list[str]:
    """List the flags of ``trainer`` with their dashes."""
    return [name for action in _parser(trainer)._actions for name in action.option_strings]


def flag_choices(trainer: str, name: str) -> list[str]:
    """The values that the flag ``name`` of ``trainer`` can have; empty: any, or no such flag."""
    actions = (action for action in _parser(trainer)._actions if name in action.option_strings)
    return [str(choice) for action in actions for choice in action.choices or ()]


@functools.cache
def _parser(trainer: str) -> argparse.ArgumentParser:
    parser = Parser(prog=trainer, allow_abbrev=False)
    add_flags(parser, Config, title="every trainer")
    add_flags(parser, own_flags(trainer), title=trainer)
    return parser


def own_flags(trainer: str) -> type[Any]:
    """The flags of ``trainer`` alone: the one dataclass that its module defines."""
    module = import_module(f"hpcjobs.trainers.{trainer}")
    values = vars(module).values()
    (flags,) = (value for value in values if is_dataclass(value) and value.__module__ == module.__name__)
    assert isinstance(flags, type)
    return flags
