"""The figures of ``fabric``: as written to fabric.json, and beside products and copies that numpy makes here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commandline import ok
from waiting import eventually

from hpcjobs.fabric.verdict import Findings, collectives, gpu_table
from hpcjobs.record.fabric import FabricPoint, GpuReport


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
    source, target = np.ones(1 << 27, np.uint8), np.empty(1 << 27, np.uint8)

    def agrees(work: Callable[[], object], amount: float, printed: float, factor: float) -> bool:
        measured = amount / best_seconds(work) / 1e9
        return measured / factor < printed < measured * factor

    # Other tests may run beside a measurement: it is made again then.
    eventually(lambda: agrees(lambda: square @ square, 2 * 1500**3, float(flops), 5), what="the rate of products")
    eventually(lambda: agrees(lambda: np.copyto(target, source), 1 << 27, float(memory), 6), what="the rate of copies")


def test_the_tables_of_a_check_have_the_figures_of_its_file() -> None:
    chance = np.random.default_rng(6)
    gpus = [
        GpuReport("n1", index, None, "H100", chance.uniform(1e13, 1e15), chance.uniform(1e11, 4e12), peers={
            "0": chance.uniform(1e9, 1e10), "1": chance.uniform(1e10, 4e11)}) for index in range(4)
    ]  # fmt: skip
    head, names, *rows = gpu_table(gpus)
    assert head.split()[1:] == ["TFLOP/s", "GB/s", "GB/s", "model"]
    assert names.split() == ["flops", "memory", "peer"]
    for row, gpu in zip(rows, gpus, strict=True):
        shown = [float(cell.replace(",", "")) for cell in row.split()[3:6]]
        assert shown == pytest.approx([gpu.flops / 1e12, gpu.memory_bytes_per_s / 1e9, gpu.peers["1"] / 1e9], rel=5e-3)
        assert "e+" not in row
    points = tuple(FabricPoint(8 << (4 * n), float(10 ** chance.uniform(-6, 0))) for n in range(6))
    _, *lines = collectives(Findings([], allreduce={"mpi": points}))
    assert len(lines) == len(points)
    for line, point in zip(lines, points, strict=True):
        size, _, micros = line.replace(",", "").split()
        assert int(size) == point.bytes
        assert float(micros) == pytest.approx(point.seconds * 1e6, rel=5e-3)
        assert "e+" not in line, "all-reduce"
