"""The CUDA and MPI program: compiled here, and what it prints on ranks of this machine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_compiler import NVCC, needs_nvcc

from hpcjobs.fabric import build as builder
from hpcjobs.fabric.build import build
from hpcjobs.runtime.exits import MissingData

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
FOREIGN = ("HPCJOBS_", "SLURM_", "OMPI_", "PMIX_")

if shutil.which("mpicxx") is None or shutil.which("mpirun") is None:
    pytest.skip("no MPI compiler here", allow_module_level=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        made = build("cpu")
        before = made.stat().st_mtime_ns
        assert build("cpu") == made
        assert made.stat().st_mtime_ns == before, "compiled twice"
        return made


def run(program: Path, ranks: int, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    own |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", **env}
    return subprocess.run(
        [*MPIRUN, "-np", str(ranks), program, *arguments], env=own, capture_output=True, text=True, timeout=120
    )


def test_two_ranks_print_the_sum_that_the_formula_gives(program: Path) -> None:
    """256³ · 0.5 · (1 + 2)."""
    done = run(program, 2)
    assert done.returncode == 0, done
    assert "sum over 2 ranks, N=256: 25165824.00" in done.stdout


@pytest.mark.parametrize("arguments", [("--dtype", "double"), ("--dtype", "float"), ("--size", "97"), ("--size", "1")])
def test_random_matrices_are_checked_against_double_precision(program: Path, arguments: tuple[str, ...]) -> None:
    done = run(program, 2, "--matrices", "random", *arguments)
    assert done.returncode == 0, done


def test_figures_come_as_json_with_a_host_for_each_rank_and_the_sweep(program: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    done = run(program, 2, "--size", "64", "--iterations", "3", "--sweep", "16K", "--json", str(figures_file))
    assert done.returncode == 0, done
    figures = json.loads(figures_file.read_text())
    assert (figures["world_size"], figures["total"]) == (2, 64**3 * 0.5 * 3)
    assert [rank["host"] for rank in figures["ranks"]] == [os.uname().nodename] * 2
    assert [point["bytes"] for point in figures["allreduce"]] == [1024, 4096, 16384]
    assert all(rank["gflops"] > 0 for rank in figures["ranks"])


@pytest.mark.parametrize("arguments", [("--size", "-3"), ("--sise", "3"), ("--dtype", "half"), ("--size",)])
def test_a_wrong_option_is_named_and_ends_with_2(program: Path, arguments: tuple[str, ...]) -> None:
    done = run(program, 1, *arguments)
    assert done.returncode == 2, done
    assert arguments[0] in done.stderr


def test_a_world_of_one_is_refused_where_more_were_asked_for(program: Path) -> None:
    done = run(program, 1, HPCJOBS_NTASKS="4", HPCJOBS_LAUNCHED_BY="srun --mpi=none")
    assert done.returncode == 10, done
    assert "MPI sees 1 of 4 ranks: srun --mpi=none does not speak to Open MPI" in done.stderr


def test_without_a_compiler_the_message_says_what_to_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingData, match=r"no mpicxx in the PATH of .* Hint: is MPI's module named.*dnf"):
        build()


def test_it_is_built_on_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lustre without its mount option flock."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "SOURCE", tmp_path / "small.cpp")
    (tmp_path / "small.cpp").write_text("int main() { }")
    assert build("cpu").exists()


def test_what_the_compiler_says_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(builder, "SOURCE", tmp_path / "broken.cpp")
    (tmp_path / "broken.cpp").write_text("int main( { }")
    with pytest.raises(builder.BuildError, match="expected"):
        build("cpu")
    assert not list(tmp_path.rglob("matmul"))


@pytest.mark.parametrize(
    ("visible", "compiler"), [(None, "nvcc"), ("0", "nvcc"), ("", "mpicxx"), ("-1", "mpicxx"), ("NoDevFiles", "mpicxx")]
)
def test_a_job_without_gpus_on_a_machine_that_has_some_gets_the_program_for_cpus(
    visible: str | None, compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By stand-ins of the compilers, which write their name where the program would be."""
    for name in ("mpicxx", "nvcc"):
        (tmp_path / name).write_text(f'#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] || echo {name} >"$last"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "_has_device", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.chdir(tmp_path)
    assert build().read_text() == f"{compiler}\n"


@needs_nvcc
def test_nvcc_compiles_the_same_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For one kind of GPU: for all it takes minutes."""
    assert NVCC is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(NVCC).parent}:{os.environ['PATH']}")
    monkeypatch.setattr(builder, "compute_capabilities", lambda: ["90"])
    made = build("cuda")
    assert b"cudaMalloc" in made.read_bytes()


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        ("9.0\\n9.0", ["-gencode=arch=compute_90,code=sm_90"]),
        ("8.0\\n7.5", ["-gencode=arch=compute_75,code=sm_75", "-gencode=arch=compute_80,code=sm_80"]),
        ('Field "compute_cap" is not a valid field to query.', ["-arch=all-major"]),
    ],
)
def test_another_kind_of_gpu_gets_a_program_of_its_own(
    answer: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By stand-ins: the compiler writes its arguments where the program would be."""
    compiler = '#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] || echo "$@" >"$last"\n'
    for name, text in {
        "mpicxx": compiler,
        "nvcc": compiler,
        "nvidia-smi": f"#!/bin/sh\nprintf '{answer}\\n'\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = build("cuda")
    arguments = made.read_text().split()
    assert [arg for arg in arguments if "arch=" in arg] == flags
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 12.0\n")
    assert build("cuda") != made


def test_the_module_becomes_the_program(program: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(program.parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*MPIRUN, "-np", "2", sys.executable, "-m", "hpcjobs.fabric.matmul", "--size", "32"],
        env={name: value for name, value in env.items() if not name.startswith(FOREIGN)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert "sum over 2 ranks, N=32: 49152.00" in done.stdout, done
