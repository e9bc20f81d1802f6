"""The CUDA program without a GPU: run on the CPU, and its kernels compiled for several architectures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from cuda_compiler import NVCC, needs_nvcc

from hpcjobs.fabric.build import KERNELS, SOURCE

REPOSITORY = Path(__file__).resolve().parents[3]
EMULATED_CUDA = REPOSITORY / "tests/data/emulated_cuda"
FOREIGN = ("HPCJOBS_", "SLURM_", "OMPI_", "PMIX_")

needs_mpi = pytest.mark.skipif(shutil.which("mpicxx") is None, reason="no MPI compiler here")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    from gpu import kernels

    return kernels


def compile_emulated(folder: Path, header: str, *, source: str = SOURCE.name) -> Path:
    """The CUDA program with this text of its kernels, for a CPU."""
    shutil.copy(SOURCE, folder)
    (folder / KERNELS.name).write_text(header)
    flags = (
        "-D__CUDACC__",
        "-DNO_CUBLAS",
        "-DGPU_AWARE_MPI",
        f"-I{EMULATED_CUDA}",
        "-fopenmp",
        "-std=c++17",
        "-O2",
        "-w",
    )
    program = folder / "emulated"
    subprocess.run(["mpicxx", *flags, str(folder / source), "-o", str(program)], check=True)
    return program


def multiply(program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    env |= {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [program, "--matrices", "random", *arguments], env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_emulated(tmp_path_factory.mktemp("emulated"), KERNELS.read_text())


@needs_mpi
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        ("--size", "300"),
        ("--size", "1"),
        ("--size", "200", "--dtype", "double"),
        ("--size", "200", "--kernel", "tensor"),
    ],
)
def test_the_cuda_program_computes_all_of_c_rightly_when_a_cpu_runs_its_text(
    emulated: Path, arguments: tuple[str, ...], backwards: bool
) -> None:
    """The program compares all of C itself."""
    done = multiply(emulated, *arguments, **({"EMULATION_BACKWARDS": "1"} if backwards else {}))
    assert done.returncode == 0, done
    assert "(emulated GPU)" in done.stdout


@needs_mpi
@pytest.mark.parametrize(
    ("text", "error", "kernel"),
    [
        ("row + i * LANE_ROWS * LENGTH]", "row + i * LANE_COLUMNS * LENGTH]", "tiled"),
        ("tile[column + j][row] = ", "tile[column + j][row ^ 1] = ", "tiled"),
        ("next_b.store(shared.b[0], thread);\n    __syncthreads();", "next_b.store(shared.b[0], thread);", "tiled"),
        ("column + j * PIECE, sums[i][j]", "column, sums[i][j]", "tensor"),
        ("next_b.store(shared.b[now ^ 1], thread);", "next_b.store(shared.b[now], thread);", "tensor"),
    ],
)
def test_an_error_in_an_index_or_a_missing_barrier_is_reported_as_a_wrong_product(
    tmp_path: Path, text: str, error: str, kernel: str
) -> None:
    header = KERNELS.read_text()
    assert text in header
    done = multiply(compile_emulated(tmp_path, header.replace(text, error)), "--size", "256", "--kernel", kernel)
    assert done.returncode == 1
    assert "computes wrongly: row " in done.stderr


AS_RANK_256 = """
#define main program
#include "matmul.cpp"
#undef main
int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    rank_ = 256, ranks_ = 257;
    Options options;
    options.size = 128, options.kernel = Kernel::tensor, options.dtype = Dtype::bf16;
    double total = 0, all = 0;
    for (rank_ = 0; rank_ < ranks_; rank_ += rank_ ? 1 : 255) run_in(options, 0, total);
    for (int rank = 0; rank < ranks_; ++rank) all += 128. * 128 * 128 * 0.5 * left_of(options, rank);
    check_total(options, all);
    MPI_Finalize();
}
"""


@needs_mpi
def test_in_bf16_a_world_of_more_than_256_ranks_is_not_accused_of_wrong_products(tmp_path: Path) -> None:
    """bf16 has 8 bits: 257 is none of its numbers."""
    (tmp_path / "rank.cpp").write_text(AS_RANK_256)
    done = multiply(compile_emulated(tmp_path, KERNELS.read_text(), source="rank.cpp"))
    assert done.returncode == 0, done


@needs_mpi
def test_where_mpi_reads_the_memory_of_gpus_the_sweep_sends_from_there(emulated: Path) -> None:
    done = multiply(emulated, "--size", "8", "--sweep", "4K", "--json", "-")
    figures = json.loads(done.stdout)
    assert figures["allreduce_memory"] == "device"
    assert figures["ranks"][0]["bus_id"] == "0000:17:00.0"


@needs_nvcc
def test_registers_and_shared_memory_are_those_of_the_design(kernels: ModuleType, tmp_path: Path) -> None:
    uses = kernels.compile_kernels(NVCC, tmp_path, architectures=(70, 80, 90))
    assert {use.kernel for use in uses} == set(kernels.SHARED_BYTES)
    assert {use.architecture for use in uses} >= {80, 90}
    assert [problem for use in uses for problem in use.problems()] == []


@needs_nvcc
def test_shared_memory_is_read_in_vectors_and_tensor_cores_multiply(kernels: ModuleType, tmp_path: Path) -> None:
    """In each of 8 steps a thread reads 2 vectors of A and 2 of B, for 64 products."""
    ptx = kernels.compile_ptx(NVCC, tmp_path, architecture=80)
    assert ptx.count("ld.shared.v4.f32") == 8 * (2 + 2)
    assert ptx.count("fma.rn.f32") == 8 * 64
    assert ptx.count("ld.global.v4.f32") == 2 * 2
    assert "ld.shared.f32" not in ptx
    assert "wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32" in ptx


def test_what_a_kernel_uses_beyond_its_design_is_named(kernels: ModuleType) -> None:
    """As ptxas -v of CUDA 13.0 prints it."""
    output = """\
ptxas info    : Compiling entry function '_Z5tiledIdEvPKT_S2_PS0_i' for 'sm_80'
ptxas info    : Function properties for _Z5tiledIdEvPKT_S2_PS0_i
    88 bytes stack frame, 120 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 88 bytes cumulative stack size, 24832 bytes smem
ptxas info    : Compile time = 233.422 ms
ptxas info    : Compiling entry function '_Z5tiledIfEvPKT_S2_PS0_i' for 'sm_90'
ptxas info    : Function properties for _Z5tiledIfEvPKT_S2_PS0_i
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 127 registers, used 1 barriers, 16640 bytes smem
"""
    double, single = kernels.parse_uses(output)
    assert list(double.problems()) == [
        "tiled double on sm_80 moves 220 bytes of registers to memory",
        "tiled double on sm_80 uses 24832 bytes of shared memory, not 16640",
    ]
    assert (single.registers, list(single.problems())) == (127, [])
