"""States that hold torch's tensors: copied into buffers that stay, written, read.

Other modules do not load torch: this module is imported only for a state or file with tensors.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch

Keys = tuple[Any, ...]
"""The keys and numbers that lead to a tensor."""
UNCHANGING = (bool, int, float, complex, str, bytes, type(None))


class Buffers:
    """Copies of a state in host memory, each tensor in the buffer that it had the time before."""

    def __init__(self) -> None:
        self._buffers: dict[Keys, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, state: Any) -> Any:
        """The same tree of dicts, lists and tuples with every tensor copied, once all copies have arrived.

        Other values are copied too: an array or an object may change before it is written.
        """
        self._devices.clear()
        copied = self.copy_tree(state, ())
        for device in self._devices:  # the current one may be another
            torch.cuda.synchronize(device)
        return copied

    def copy_tree(self, value: Any, path: Keys) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.copy_tensor(value.detach(), path)
        if kind in (dict, OrderedDict):
            return {key: self.copy_tree(item, (*path, key)) for key, item in value.items()}
        if kind in UNCHANGING:
            return value
        if kind in (list, tuple):
            return kind(self.copy_tree(item, (*path, n)) for n, item in enumerate(value))
        return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def copy_tensor(self, tensor: torch.Tensor, path: Keys) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[path] = buffer
        if tensor.device.type == "cuda":
            self._devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=True)


def find_nan(value: Any, keys: str = "") -> str | None:
    """The keys that lead to the first tensor with NaN, in dicts, lists and tuples; None without NaN."""
    if isinstance(value, torch.Tensor):
        return (keys or "the tensor") if value.is_floating_point() and bool(value.isnan().any()) else None
    items = value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ()
    paths = (find_nan(item, f"{keys}.{key}" if keys else f"{key}") for key, item in items)
    return next((path for path in paths if path is not None), None)


def write(path: Path, state: Any) -> None:
    """Write a state and sync it. Without torch's own checksums, which it writes and never reads: manifests have one.

    Raises OSError: it cannot be written; it replaces torch's RuntimeError.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)


def read(file: Path | BinaryIO, *, any_object: bool) -> Any:
    """A state, in host memory; with ``any_object`` also other objects than plain values and tensors: code may run."""
    return torch.load(file, map_location="cpu", weights_only=not any_object)
