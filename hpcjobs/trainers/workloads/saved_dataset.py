"""Datasets of Hugging Face that `save_to_disk` wrote: memory-mapped, read by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.workloads.base import load_package

MARKS = ("dataset_dict.json", "state.json")
HELD_OUT = ("validation", "test")


class Parts(NamedTuple):
    """The rows of a saved dataset to train on, and those to evaluate on."""

    train: Any
    held_out: Any


def is_saved_dataset(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def open_saved_dataset(folder: Path, *, option: str) -> Any:
    """A Dataset, or a DatasetDict: splits by name.

    Raises:
        MissingData, BadData: the package is missing, or the folder can't be read.
    """
    datasets = load_package("datasets", f"{option} {folder}", package="datasets", extra="huggingface")
    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise BadData(f"{option} {folder} can't be read as a saved dataset: {error}") from error


def load_saved_dataset(folder: Path, *, option: str, columns: Sequence[str], held_out_every: int) -> Parts:
    """Return the splits `train` and `validation` (or `test`) of a saved dataset.

    Without a held-out split, every `held_out_every`-th row is held out.

    Raises:
        MissingData, BadData: as `open_saved_dataset`, or a split or a column is missing.
    """
    loaded, held = open_saved_dataset(folder, option=option), None
    if hasattr(loaded, "values"):
        held_name = next((name for name in HELD_OUT if name in loaded), None)
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
    return Parts(loaded, held)
