"""Write the model of a checkpoint, of whichever strategy and world size, into one safetensors file.

python -m hpcjobs.trainers.checkpoint.export RUN_FOLDER --out model.safetensors
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.exits import BadCheckpoint, MissingData, TrainerError, UsageError, print_error
from hpcjobs.trainers import checkpoint
from hpcjobs.trainers.config import Parser, add_flags, flag, parse_all, read_flags
from hpcjobs.trainers.optimization import KEY
from hpcjobs.trainers.weights import Adapters, load_safetensors, merge, read_weights, write_adapters, write_weights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ExportFlags:
    """The flags of the export."""

    out: str = flag("model.safetensors", "file to write; of adapters a folder, as peft reads it", metavar="PATH")
    average: bool = flag(False, "the average of the weights that --ema kept")
    merge: bool = flag(False, "of a run with --lora: the complete model, with its adapters added to the weights")
    base: str | None = flag(
        None, "with --merge: the weights that were adapted [where the run read them]", metavar="PATH"
    )
    dtype: str | None = flag(None, "of floating-point tensors [as they are]", choices=tuple(DTYPES))


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parser = Parser(prog="export", description=__doc__, allow_abbrev=False,
                        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        add_flags(parser, ExportFlags, title="export")
        parser.add_argument(
            "source", metavar="RUN_FOLDER", help="a run folder (its newest sound checkpoint), or a checkpoint"
        )
        parsed = parse_all(parser, argv)
        print(export(read_flags(ExportFlags, parsed), Path(parsed.source)))
    except TrainerError as error:
        print_error(f"error: {error}")
        return error.code
    return 0


def export(flags: ExportFlags, source: Path) -> str:
    """Write the file; one line about it. Raises TrainerError: no checkpoint is sound, or the file can't be written."""
    load_safetensors()
    place = find_checkpoint(source)
    meta, state = checkpoint.read(place)
    tensors = average_of(state, place) if flags.average else state["model"]
    adapters = Adapters.read(state)
    if flags.merge:
        if adapters is None:
            raise UsageError(f"--merge: {place} has no adapters, but the complete model", hint="leave it out")
        base = flags.base or adapters.base
        if base is None:
            raise UsageError("--merge needs --base PATH: the run did not read its frozen weights from a file")
        tensors = merge(read_weights(Path(base)), tensors, adapters)
    elif adapters is not None:
        write_adapters(Path(flags.out), tensors, adapters)
        return f"{flags.out}: adapters of rank {adapters.rank}, of step {meta.step} ({place})"
    dtype = None if flags.dtype is None else DTYPES[flags.dtype]
    tensors = {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    try:
        write_weights(Path(flags.out), tensors, {"step": str(meta.step), "checkpoint": place.name})
    except OSError as error:
        raise UsageError(f"--out {flags.out} can't be written: {error}") from error
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return f"{flags.out}: {len(tensors)} tensors, {numbers:,} numbers, of step {meta.step} ({place})"


def find_checkpoint(source: Path) -> Path:
    """The checkpoint itself, or the newest sound one of a run folder."""
    if (source / checkpoints.MANIFEST).is_file():
        problem = checkpoints.damage(source)
        if problem is not None:
            raise BadCheckpoint(f"{source}: {problem}")
        return source.resolve()
    newest = checkpoints.find_newest(source / checkpoints.FOLDER, report=print_error, hint=None)
    if newest is not None:
        return newest
    raise MissingData(f"{source} has no checkpoint", hint="--checkpoint-every N of the run saves some")


def average_of(state: dict[str, Any], place: Path) -> dict[str, torch.Tensor]:
    """The model's tensors, with the averages in the place of the parameters that were trained."""
    averages = {
        name: values[KEY]
        for number, name in enumerate(state.get("parameter_names", ()))
        if KEY in (values := state["optimizer"]["state"].get(number, {}))
    }
    if not averages:
        raise MissingData(f"{place} has no average of the weights", hint="train with --ema 0.999")
    model: dict[str, torch.Tensor] = state["model"]
    return {name: averages.get(_twin(name, model, averages), tensor) for name, tensor in model.items()}


def _twin(name: str, model: dict[str, torch.Tensor], averages: dict[str, torch.Tensor]) -> str:
    """Return the name under which a tied weight has its average: a parameter with the same values."""
    if name in averages:
        return name
    return next((other for other in averages if torch.equal(model[other], model[name])), name)


if __name__ == "__main__":
    sys.exit(main())
