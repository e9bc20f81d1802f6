"""Writes a program's state as JSON if that is lossless, with tensors in torch's format, or as pickle.

| the state holds | file | read back |
|---|---|---|
| dicts with text as keys, lists, text, numbers, booleans, None | .json | |
| tensors, with whatever else | .pt | on the CPU |
| anything else, tuples and dicts with other keys included | .pkl | |

Files of the last two kinds can run code when they are read, so they are read only if they belong to this user.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcjobs.runtime.exits import BadCheckpoint

if TYPE_CHECKING:
    from hpcjobs.torch_state import Buffers


@dataclass(frozen=True)
class RunState:
    """A copy of a state: bytes, or a tree with copies of its tensors."""

    suffix: str
    content: Any


class Snapshots:
    """Takes snapshots; buffers for tensors are kept."""

    def __init__(self) -> None:
        self._buffers: Buffers | None = None

    def take(self, state: Any) -> RunState:
        """Raises TypeError where the state cannot be written."""
        try:
            if _holds_tensors(state):
                if self._buffers is None:
                    from hpcjobs.torch_state import Buffers

                    self._buffers = Buffers()
                return RunState(".pt", self._buffers.copy(state))
            if _is_json(state):
                return RunState(".json", json.dumps(state).encode())
            return RunState(".pkl", pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL))
        except RecursionError as error:
            raise TypeError("save(): the state can't be written: it holds itself, or is nested too deep") from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"save(): the state can't be written: {error}") from error


def find_nan(state: Any) -> str | None:
    """Return the path of the first tensor with NaN, or None. Plain numbers may be NaN."""
    if not _holds_tensors(state):
        return None
    from hpcjobs import torch_state

    return torch_state.find_nan(state)


def write(path: Path, snapshot: RunState) -> Path:
    """Write a snapshot and sync it; the file, which is ``path`` with a suffix. Raises OSError."""
    file_path = path.with_suffix(snapshot.suffix)
    if snapshot.suffix == ".pt":
        from hpcjobs import torch_state

        torch_state.write(file_path, snapshot.content)
        return file_path
    with file_path.open("wb") as file:
        file.write(snapshot.content)
        file.flush()
        os.fsync(file.fileno())
    return file_path


def read(path: Path) -> Any:
    """The state of ``path`` with any suffix. Raises BadCheckpoint."""
    files = [path.with_suffix(suffix) for suffix in (".json", ".pt", ".pkl") if path.with_suffix(suffix).exists()]
    if not files:
        raise BadCheckpoint(f"{path.parent} has no {path.name}.json, .pt or .pkl", hint="was it written by Run.save()?")
    (file_path,) = files
    try:
        if file_path.suffix == ".json":
            return json.loads(file_path.read_bytes())
        owner = file_path.stat().st_uid
        if owner != os.geteuid():
            raise BadCheckpoint(
                f"{file_path} belongs to user {owner}, and reading it could run code of theirs",
                hint="copy the checkpoint, if you trust it",
            )
        if file_path.suffix == ".pt":
            from hpcjobs import torch_state

            return torch_state.read(file_path, any_object=True)
        return pickle.loads(file_path.read_bytes())
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, ImportError, AttributeError) as error:
        raise BadCheckpoint(f"{file_path} can't be read: {error}") from error


def _holds_tensors(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(value, torch.Tensor):
        if hasattr(value, "placements"):
            raise TypeError(
                "a tensor is spread over ranks (DTensor). Save its local part (.to_local()) with sharded=True, "
                "or the full state (torch.distributed.checkpoint.state_dict.get_model_state_dict)"
            )
        return True
    if isinstance(value, dict):
        return True in [_holds_tensors(item) for item in value.values()]
    return type(value) in (list, tuple) and True in [_holds_tensors(item) for item in value]


def _is_json(value: Any) -> bool:
    """Whether JSON gives back just this; types are compared exactly, since it would make lists of tuples."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(_is_json(item) for item in value)
    return type(value) is dict and all(type(key) is str and _is_json(item) for key, item in value.items())
