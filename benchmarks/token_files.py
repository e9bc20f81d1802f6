"""Tokenised files: how quickly they are written against plain numpy, and what reading a batch costs of a training step.

python benchmarks/token_files.py
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from harness import parse_no_arguments

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.data.tokenize import TokenizeFlags, tokenize
from hpcjobs.trainers.workloads.lm import lm

TEXT = "seven letters and more. " * 5000
DOCUMENTS = 800  # about 10^8 tokens
ROUNDS = 3
STEPS = 20


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parse_no_arguments(__doc__)
    with TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        lines = folder / "corpus.jsonl"
        with lines.open("w", encoding="utf-8") as file:
            for _ in range(DOCUMENTS):
                file.write(json.dumps({"text": TEXT}) + "\n")
        ratios = []
        for number in range(ROUNDS):
            out = folder / f"tokens-{number}"
            tokenize_s = seconds(lambda out=out: tokenize(TokenizeFlags(out=str(out)), [lines]))  # type: ignore[misc]
            tokens = np.fromfile(next(out.glob("train-*.bin")), dtype=np.uint16)
            numpy_s = seconds(lambda tokens=tokens: tokens.tofile(folder / "plain.bin"))  # type: ignore[misc]
            ratios.append(tokenize_s / numpy_s)
            rates = f"{len(tokens) / tokenize_s / 1e6:.0f} M/s, numpy alone {len(tokens) / numpy_s / 1e6:.0f} M/s"
            print(f"{len(tokens):,} tokens: {rates}")
        print(f"time as a multiple of numpy's: median {statistics.median(ratios):.1f}")
        workload = lm(Config(workload="lm", tokens=(str(folder / "tokens-0"),), preset="small"))
        model, order = workload.build_model(), torch.randperm(len(workload.train)).tolist()
        read, step = [], []
        for number in range(STEPS):
            indices = order[16 * number : 16 * (number + 1)]
            began = time.perf_counter()
            batch = workload.train.read_batch(indices)
            read.append(time.perf_counter() - began)
            step.append(seconds(lambda batch=batch: workload.loss(model, batch).backward()))  # type: ignore[misc, union-attr]
        share = statistics.median(read) / statistics.median(step)
        print(f"a batch of 16 x 256 tokens: {1e3 * statistics.median(read):.2f} ms, {100 * share:.2f} % of a step")


if __name__ == "__main__":
    main()
