"""Token sequences to learn from: files of tokens, text read byte by byte, or a pattern made up on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from hpcjobs.runtime.exits import BadData, MissingData
from hpcjobs.trainers.workloads.base import Batch
from hpcjobs.trainers.workloads.batch import move_numbers
from hpcjobs.trainers.workloads.token_files import Tokens, list_token_files, map_tokens

HELD_OUT_SHARE = 20  # the last twentieth of each file


class SyntheticTokens:
    """Sample i counts upward from a start in steps of its own: learnable, endless, and made in O(1)."""

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


def byte_windows(paths: Sequence[str], *, length: int) -> tuple[TokenWindows, TokenWindows]:
    """The training windows of text files, byte by byte, and the held-out ones from the end of each."""
    return split_windows([_map_file(Path(path), length) for path in paths], length=length)


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
