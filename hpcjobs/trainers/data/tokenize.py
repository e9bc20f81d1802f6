"""Make memory-mapped tokens from text files (one document each) or JSON lines (one document per line).

python -m hpcjobs.trainers.data.tokenize --tokenizer tokenizer.json --out tokens corpus/*.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from hpcjobs.runtime.exits import BadData, MissingData, TrainerError, UsageError, print_error
from hpcjobs.trainers.config import Parser, add_flags, flag, parse_all, positive, read_flags
from hpcjobs.trainers.workloads.base import is_saved_dataset, load_package, open_saved_dataset
from hpcjobs.trainers.workloads.lm import Tokens, TokensInfo, TokenWriter

BYTES = "bytes"
BATCH_DOCUMENTS = 1000
Encode = Callable[[list[str]], Iterable[Sequence[int] | Tokens]]


@dataclass(frozen=True)
class TokenizeFlags:
    """The flags of the tokenization."""

    tokenizer: str = flag(
        BYTES, "a tokenizer.json of Hugging Face (pip install 'hpcjobs[tokenizer]'), or bytes: 256 and an end of text"
    )
    out: str = flag("tokens", "folder to make", metavar="DIR")
    layout: str = flag("nanogpt", "megatron also takes more than 65,536 tokens", choices=("nanogpt", "megatron"))
    text_field: str = flag("text", "where a JSON line has its text", metavar="NAME")
    end_of_text: str | None = flag(None, "token after each document [<|endoftext|>, </s> or <eos>]", metavar="TOKEN")
    held_out_every: int = flag(100, "of so many documents the last one is held out", parse=positive(int), metavar="N")
    shard_tokens: int = flag(1_000_000_000, "tokens per file, about", parse=positive(int), metavar="N")


@dataclass(frozen=True)
class Tokenizer:
    """Makes tokens of text; `end_of_text` is the token after a document, if there is one."""

    encode: Encode
    vocabulary: int
    end_of_text: int | None


def main(argv: Sequence[str] | None = None) -> int:
    try:
        parser = Parser(prog="tokenize", description=__doc__, allow_abbrev=False,
                        formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        add_flags(parser, TokenizeFlags, title="tokenize")
        parser.add_argument(
            "files", nargs="+", metavar="FILE", help="text, JSON lines (.jsonl), or a folder that datasets saved"
        )
        parsed = parse_all(parser, argv)
        began = time.perf_counter()
        info = tokenize(read_flags(TokenizeFlags, parsed), [Path(name) for name in parsed.files])
    except TrainerError as error:
        print_error(f"error: {error}")
        return error.code
    took, total = time.perf_counter() - began, info.train_tokens + info.held_out_tokens
    print(
        f"{info.documents:,} documents, {info.train_tokens:,} tokens to train on, {info.held_out_tokens:,} held out, "
        f"vocabulary {info.vocabulary:,}, in {took:.1f} s ({total / took / 1e6:.1f} M tokens/s): {parsed.out}"
    )
    return 0


def tokenize(flags: TokenizeFlags, files: Sequence[Path]) -> TokensInfo:
    """Make the folder `flags.out`, which is there complete or not at all.

    Raises TrainerError: a file or the tokenizer is missing or broken, or the folder is there already.
    """
    out = Path(flags.out)
    if out.exists():
        raise UsageError(f"--out {out} is there already", hint="another name, or remove it first")
    for path in files:
        if not path.is_file() and not is_saved_dataset(path):
            raise MissingData(f"{path}: no such file")
    tokenizer = load_tokenizer(flags)
    dtype = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.int32
    if dtype is np.int32 and flags.layout == "nanogpt":
        raise UsageError(
            f"the vocabulary has {tokenizer.vocabulary:,} tokens, but nanoGPT's layout has 16 bits for each",
            hint="--layout megatron",
        )
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True)
        info = _write_all(flags, files, tokenizer, part, dtype)
        part.rename(out)
    except OSError as error:
        raise UsageError(f"--out {out} can't be written: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return info


def _write_all(
    flags: TokenizeFlags, files: Sequence[Path], tokenizer: Tokenizer, folder: Path, dtype: type[np.generic]
) -> TokensInfo:
    train, held_out = (_Shards(folder / name, flags, dtype) for name in ("train", "val"))
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=dtype)
    documents, sources = 0, read_documents(files, flags.text_field)
    while texts := list(islice(sources, BATCH_DOCUMENTS)):
        for tokens in tokenizer.encode(texts):
            documents += 1
            (held_out if documents % flags.held_out_every == 0 else train).add(np.append(tokens, end).astype(dtype))
    train.close()
    held_out.close()
    if train.tokens == 0:
        raise BadData(f"{documents} documents have no tokens to train on")
    info = TokensInfo(tokenizer.vocabulary, tokenizer.end_of_text, flags.tokenizer, flags.layout, documents,
                      train.tokens, held_out.tokens)  # fmt: skip
    info.write(folder)
    if flags.tokenizer != BYTES:
        shutil.copyfile(flags.tokenizer, folder / "tokenizer.json")
    return info


class _Shards:
    """Files NAME-00000.bin, NAME-00001.bin, …; none without a document."""

    def __init__(self, name: Path, flags: TokenizeFlags, dtype: type[np.generic]) -> None:
        self._name, self._flags, self._dtype = name, flags, dtype
        self._writer: TokenWriter | None = None
        self._number = self.tokens = 0

    def add(self, tokens: Tokens) -> None:
        if self._writer is None:
            name = self._name.with_name(f"{self._name.name}-{self._number:05d}")
            self._writer = TokenWriter(name, layout=self._flags.layout, dtype=self._dtype)
        self._writer.add(tokens)
        self.tokens += len(tokens)
        if self._writer.tokens >= self._flags.shard_tokens:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._number += 1


def load_tokenizer(flags: TokenizeFlags) -> Tokenizer:
    if flags.tokenizer == BYTES:
        return Tokenizer(lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts], 257, 256)
    tokenizers = load_package("tokenizers", "--tokenizer", package="tokenizers", extra="tokenizer")
    if not Path(flags.tokenizer).is_file():
        raise MissingData(f"--tokenizer {flags.tokenizer}: no such file", hint="the tokenizer.json of a model")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(flags.tokenizer)
    except Exception as error:  # the package raises no narrower type
        raise BadData(f"--tokenizer {flags.tokenizer} can't be read: {error}") from error
    candidates = ("<|endoftext|>", "</s>", "<eos>") if flags.end_of_text is None else (flags.end_of_text,)
    ends = [number for name in candidates if (number := tokenizer.token_to_id(name)) is not None]
    if flags.end_of_text is not None and not ends:
        raise UsageError(f"--end-of-text {flags.end_of_text}: {flags.tokenizer} has no such token")

    def encode(texts: list[str]) -> Iterable[Sequence[int]]:
        return (one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    numbers = tokenizer.get_vocab(with_added_tokens=True).values()  # numbers may be missing between them
    return Tokenizer(encode, max(numbers, default=0) + 1, ends[0] if ends else None)


def read_documents(files: Sequence[Path], text_field: str) -> Iterator[str]:
    """The texts of JSON lines (.jsonl, .json), of the rows of a saved dataset, and of any other file as one document.

    Raises BadData: names the file and line that can't be read.
    """
    for path in files:
        try:
            if path.is_dir():
                yield from _read_dataset(path, text_field)
                continue
            if path.suffix not in (".jsonl", ".json"):
                yield path.read_text(encoding="utf-8")
                continue
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text_of(line, f"{path}:{number}", text_field)
        except UnicodeDecodeError as error:
            raise BadData(f"{path} is not UTF-8 text: {error}") from error


def _read_dataset(folder: Path, text_field: str) -> Iterator[str]:
    """All splits, one after the other."""
    loaded = open_saved_dataset(folder, option="tokenize")
    for split in loaded.values() if hasattr(loaded, "values") else [loaded]:
        if text_field not in split.column_names:
            columns = ", ".join(split.column_names)
            raise BadData(f"{folder} has no text in {text_field!r}; it has {columns}", hint="--text-field NAME")
        yield from (row[text_field] for row in split)


def _text_of(line: str, where: str, text_field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadData(f"{where} is not JSON: {error}") from error
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        names = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise BadData(f"{where} has no text in {text_field!r}; it has {names}", hint="--text-field NAME")
    return text


if __name__ == "__main__":
    sys.exit(main())
