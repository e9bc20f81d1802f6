"""Steps that compare speed: trainers with a plain loop, the matrix program with cuBLAS, the nodes' own check."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu import kernels
from gpu.bench import Bench
from gpu.steps import CannotRun, Figures, Step

AT_LEAST_OF_PLAIN, AT_LEAST_OF_CUBLAS = 0.95, 0.7
BENCHMARKS = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
SIZES = {
    "resnet50": (("resnet50",), {"batch-size": 64, "steps": 60}, {"batch-size": 2, "steps": 3, "image-size": 32}),
    "gpt2": (
        ("lm",),
        {"preset": "gpt2", "batch-size": 8, "steps": 40},
        {"preset": "tiny", "sequence-length": 16, "batch-size": 2, "steps": 3},
    ),
}


def compare_speed(name: str, compiled: bool, bench: Bench) -> Figures:
    (workload,), real, tiny = SIZES[name]
    sizes: dict[str, Any] = bench.choose(real, tiny)
    flags = [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
    flags += ["--precision", bench.precision, *(["--compile"] if compiled else [])]
    label = f"speed-{name}{'-compile' if compiled else ''}"
    argv = [sys.executable, "-m", "gpu.plain_loop", workload, *flags, "--device", bench.device]
    plain_run = bench.run(f"{label}-plain", argv, env=BENCHMARKS, limit_s=240.0)
    if plain_run.code:
        raise RuntimeError(f"the plain loop ended with {plain_run.code}: {plain_run.last_lines}")
    plain_s = json.loads(plain_run.text.strip().splitlines()[-1])["step_s"]
    quiet = ("--workload", workload, "--no-probe", "--eval-every", "0", "--resume", "none")
    summary = bench.train(label, "ddp", *quiet, *flags, ranks=1).summary
    if summary.step_time_s is None or summary.throughput is None:
        raise RuntimeError("the summary has no times of steps")
    units = summary.throughput.value * summary.step_time_s.median
    return {
        "unit": summary.throughput.unit,
        "device": summary.device_name or summary.device,
        "precision": summary.precision,
        "step_s": summary.step_time_s.median,
        "plain_step_s": plain_s,
        "of_plain": plain_s / summary.step_time_s.median,
        "least_of_plain": 0.0 if bench.rehearse else AT_LEAST_OF_PLAIN,
        "mfu": summary.mfu,
        "throughput": summary.throughput.value,
        "units_per_step": units,
    }


def check_speed(figures: Figures) -> Iterator[str]:
    if figures["of_plain"] < figures["least_of_plain"]:
        yield f"{figures['of_plain']:.2f} of the plain loop's speed, not {figures['least_of_plain']}"


def multiply(bench: Bench) -> Figures:
    """The CUDA and MPI program, by its own kernel and by cuBLAS."""
    if shutil.which("mpicxx") is None:
        raise CannotRun("no mpicxx in PATH")
    if bench.device == "cuda" and shutil.which("nvcc") is None:
        raise CannotRun("no nvcc in PATH")
    rates = {}
    for name, flags in list_products(bench).items():
        with suppress(BuiltWithoutCublas):
            rates[name] = measure_product(name, flags, bench)
    if bench.device == "cuda" and "blas" not in rates:
        raise CannotRun(f"the program is built without cuBLAS, so its {rates['tiled']:,.0f} GFLOP/s are not judged")
    fp32, bf16 = (rates[mine] / rates[blas] if blas in rates else None for mine, blas in (("tiled", "blas"), BF16))
    return {"gflops": rates, "of_cublas": fp32, "least_of_cublas": AT_LEAST_OF_CUBLAS, "of_cublas_bf16": bf16}


class BuiltWithoutCublas(Exception):
    """There is nothing to compare the kernels with."""


BF16 = ("tensor", "blas-bf16")


def list_products(bench: Bench) -> dict[str, tuple[str, ...]]:
    """Flags of the program, by name of the measurement: bf16 only where the GPU multiplies it."""
    if bench.device != "cuda":
        return {"tiled": ("--kernel", "tiled")}
    fp32 = {kernel: ("--kernel", kernel) for kernel in ("tiled", "blas")}
    bf16 = dict(zip(BF16, (("--kernel", "tensor"), ("--kernel", "blas", "--dtype", "bf16")), strict=True))
    return {**fp32, **(bf16 if bench.precision == "bf16" else {})}


def measure_product(name: str, flags: tuple[str, ...], bench: Bench) -> float:
    """GFLOP/s of one rank; the program has compared all of C with A and B."""
    result = bench.out / "runs" / f"matmul-{name}.json"
    size, count = bench.choose(("8192", "20"), ("128", "2"))
    sizes = ("--size", size, "--matrices", "random", "--iterations", count)
    argv = [sys.executable, "-m", "hpcjobs.fabric.matmul", *sizes, *flags, "--json", str(result)]
    ended = bench.run(f"matmul-{name}", argv, limit_s=180.0)
    if ended.code and "built without cuBLAS" in ended.text:
        raise BuiltWithoutCublas
    if ended.code:
        raise RuntimeError(f"the program with {' '.join(flags)} ended with {ended.code}: {ended.last_lines}")
    rate: float = json.loads(result.read_text(encoding="utf-8"))["ranks"][0]["gflops"]
    return rate


def compile_kernels(bench: Bench) -> Figures:
    """Both kernels for every architecture that this compiler has; it needs no GPU."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CannotRun("no nvcc in PATH")
    with bench.limit(240.0) as limit_s:
        uses = kernels.compile_kernels(nvcc, bench.out / "runs", limit_s=limit_s)
    return {"uses": [asdict(use) for use in uses]}


def check_kernels(figures: Figures) -> Iterator[str]:
    for use in figures["uses"]:
        yield from kernels.KernelUse(**use).problems()


def check_product(figures: Figures) -> Iterator[str]:
    ratio, least = figures["of_cublas"], figures["least_of_cublas"]
    if ratio is not None and ratio < least:
        yield f"the kernel has {ratio:.2f} of cuBLAS's rate, not {least}"


def check_node(bench: Bench) -> Figures:
    """`hpcjobs fabric`'s own check, of this node alone."""
    folder = bench.out / "runs" / "fabric"
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "hpcjobs.fabric.check", "--quick"]
    ended = bench.run("fabric", argv, env={"HPCJOBS_RUN_DIR": str(folder)}, limit_s=150.0)
    report = folder / "fabric.json"
    if not report.exists():
        raise RuntimeError(f"the check ended with {ended.code}: {ended.last_lines}")
    document = json.loads(report.read_text(encoding="utf-8"))
    return {"code": ended.code, "table": ended.last_lines, "device": bench.device, "report": document}


def check_fabric(figures: Figures) -> Iterator[str]:
    if figures["code"]:
        yield f"the check of this node ended with {figures['code']}: {figures['table']}"
    if figures["device"] == "cuda" and not figures["report"]["gpus"]:
        yield f"no GPU was measured: {'; '.join(figures['report']['notes'])}"


def build_horovod(bench: Bench) -> Figures:
    """Horovod, built where it is not there; `losses-horovod` trains with it afterwards."""
    if find_spec("horovod") is None:
        if bench.rehearse:
            raise CannotRun("Horovod is not installed, and a rehearsal builds nothing (make horovod)")
        script = Path(__file__).resolve().parents[2] / "containers" / "install_horovod.sh"
        ended = bench.run("horovod-build", [str(script), "--optional"], limit_s=290.0)
        if ended.code:
            raise CannotRun(f"Horovod does not build here: {ended.last_lines}")
    argv = [sys.executable, "-c", "import horovod.torch as h; print(h.nccl_built(), h.mpi_built(), h.gloo_built())"]
    ended = bench.run("horovod", argv, limit_s=60.0)
    if ended.code:
        raise CannotRun(f"Horovod does not load: {ended.last_lines}")
    nccl, mpi, gloo = ended.text.strip().splitlines()[-1].split()
    return {"nccl": nccl not in ("0", "False"), "mpi": mpi == "True", "gloo": gloo == "True", "device": bench.device}


def check_horovod(figures: Figures) -> Iterator[str]:
    if figures["device"] == "cuda" and not figures["nccl"]:
        yield "Horovod is built without NCCL: its gradients would travel over the host"


PROGRAMS = (
    Step("fabric", "hpcjobs fabric's check of this node", check_node, check_fabric),
    Step(
        "kernels",
        "the CUDA kernels' registers and shared memory are those of their design",
        compile_kernels,
        check_kernels,
    ),
    Step(
        "matmul", f"the CUDA and MPI program: at least {AT_LEAST_OF_CUBLAS} of cuBLAS in fp32", multiply, check_product
    ),
)
SPEEDS = tuple(
    Step(
        f"speed-{name}{'-compile' if compiled else ''}",
        f"{name}{' with --compile' if compiled else ''}: at least {AT_LEAST_OF_PLAIN} of a plain loop's speed",
        partial(compare_speed, name, compiled),
        check_speed,
    )
    for name in SIZES
    for compiled in (False, True)
)
HOROVOD = Step("horovod", "Horovod is there, or is built, with NCCL", build_horovod, check_horovod)
