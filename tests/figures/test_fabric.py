"""The figures of ``fabric``: as written to fabric.json, and beside products and copies that numpy makes here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commandline import ok


def best_seconds(work: Callable[[], object]) -> float:
    took = []
    for _ in range(8):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def test_the_rates_of_a_node_are_those_of_products_and_copies_on_it() -> None:
    out = ok("fabric", "--site", "local", "--quick").out
    (folder,) = Path("runs").glob("fabric-*")
    (node,) = json.loads((folder / "fabric.json").read_text(encoding="utf-8"))["nodes"]
    table = out.splitlines()
    (first,) = [number for number, line in enumerate(table) if line.startswith("node ")]
    assert table[first].split()[1:] == ["GFLOP/s", "GB/s", "GB/s", "µs", "verdict"]
    host, flops, memory, network, latency, verdict = table[first + 2].split()
    assert (host, network, latency, verdict) == (node["host"], "-", "-", "good")
    assert float(flops) == pytest.approx(node["flops"] / 1e9, rel=0.005)
    assert float(memory) == pytest.approx(node["memory_bytes_per_s"] / 1e9, rel=0.005)
    square = np.random.default_rng(1).random((1500, 1500), np.float32)
    measured = 2 * 1500**3 / best_seconds(lambda: square @ square) / 1e9
    assert measured / 5 < float(flops) < measured * 5
    source, target = np.ones(1 << 27, np.uint8), np.empty(1 << 27, np.uint8)
    copied = (1 << 27) / best_seconds(lambda: np.copyto(target, source)) / 1e9
    assert copied / 6 < float(memory) < copied * 6
