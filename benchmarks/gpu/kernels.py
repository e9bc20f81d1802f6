"""What the CUDA kernels use of a GPU, as the compiler says it, against their design; needs nvcc and no GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcjobs.fabric.build import KERNELS

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100)
"""Of those that the compiler has: V100, T4, A100, A10, L40S, H100, B200."""
BF16_SINCE = 80
MOST_REGISTERS = 65536 // (2 * 256)
"""Two blocks of 256 threads share the registers of a multiprocessor."""
SHARED_BYTES = {
    "tiled float": 2 * 4 * (8 * (128 + 4) + 8 * 128),
    "tiled double": 2 * 8 * (8 * (64 + 2) + 8 * 64),
    "tensor bf16": 2 * 2 * (128 * (32 + 8) + 32 * (128 + 8)),
}
"""Two pairs of tiles of A and B, with what separates their rows."""
MANGLED = {"tiledIf": "tiled float", "tiledId": "tiled double", "6tensor": "tensor bf16"}
SOURCE = """#include "kernels.cuh"
template __global__ void tiled<float>(const float *, const float *, float *, int);
template __global__ void tiled<double>(const double *, const double *, double *, int);
"""


@dataclass(frozen=True)
class KernelUse:
    """What one thread, or one block, of a kernel uses on one architecture."""

    kernel: str
    architecture: int
    registers: int
    shared_bytes: int
    spilled_bytes: int

    def problems(self) -> Iterator[str]:
        where = f"{self.kernel} on sm_{self.architecture}"
        if self.spilled_bytes:
            yield f"{where} moves {self.spilled_bytes} bytes of registers to memory"
        if self.registers > MOST_REGISTERS:
            yield f"{where} uses {self.registers} registers: two blocks do not fit beside each other"
        if self.shared_bytes != SHARED_BYTES[self.kernel]:
            yield f"{where} uses {self.shared_bytes} bytes of shared memory, not {SHARED_BYTES[self.kernel]}"


def compile_kernels(
    nvcc: str, folder: Path, *, architectures: Sequence[int] = ARCHITECTURES, limit_s: float | None = None
) -> list[KernelUse]:
    """Compile all kernels for those of the architectures that this compiler has."""
    known = _run([nvcc, "--list-gpu-code"])
    code = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures if re.search(rf"\bsm_{one}\b", known)]
    command = [*_command(nvcc, folder), *code, "-fatbin", "-Xptxas", "-v", "-o", str(folder / "kernels.fatbin")]
    output = _run(command, limit_s=limit_s)
    return [use for use in parse_uses(output) if use.kernel != "tensor bf16" or use.architecture >= BF16_SINCE]


def compile_ptx(nvcc: str, folder: Path, *, architecture: int) -> str:
    """The assembly of all kernels."""
    ptx = folder / "kernels.ptx"
    _run([*_command(nvcc, folder), f"-arch=compute_{architecture}", "-ptx", "-o", str(ptx)])
    return ptx.read_text(encoding="utf-8")


def parse_uses(output: str) -> list[KernelUse]:
    """Of the lines of `ptxas -v`."""
    blocks = re.findall(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)\w?'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        output,
        re.DOTALL,
    )
    uses = []
    for mangled, architecture, stores, loads, registers, rest in blocks:
        [kernel] = [name for part, name in MANGLED.items() if part in mangled]
        shared = re.search(r"(\d+) bytes smem", rest)
        spilled = int(stores) + int(loads)
        uses.append(KernelUse(kernel, int(architecture), int(registers), int(shared[1]) if shared else 0, spilled))
    return uses


def _command(nvcc: str, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "kernels.cu"
    source.write_text(SOURCE, encoding="utf-8")
    return [nvcc, "-std=c++17", "-O3", "-I", str(KERNELS.parent), str(source)]


def _run(command: Sequence[str], *, limit_s: float | None = None) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{command[0]} did not end in {limit_s:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout
