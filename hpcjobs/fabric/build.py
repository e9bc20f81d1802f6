"""``python -m hpcjobs.fabric.build``: compile matmul.cpp on the node that will run it, and print where it lies.

Kept in ``~/.cache/hpcjobs/fabric`` by compiler, MPI, kind of CPU, architecture of the GPUs and source, so that a new
module or another kind of node gets another program, and the second rank uses the first rank's program.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcjobs.files import cache_dir, lock_file, make_folder
from hpcjobs.processes.start import run
from hpcjobs.runtime.exits import MissingData, TrainerError, UsageError

SOURCE = Path(__file__).with_name("matmul.cpp")
KERNELS = Path(__file__).with_name("kernels.cuh")
TARGETS = ("auto", "cpu", "cuda")
_TAIL_LINES = 12


class BuildError(TrainerError):
    """The compiler refused."""


def build(target: str = "auto") -> Path:
    """The program for this node, compiled if it has not been.

    ``auto`` is CUDA if this process has nvcc and may use a GPU, otherwise C++ with OpenMP.

    Raises MissingData: no compiler on PATH. BuildError: it refused; its last lines are quoted.
    """
    if target not in TARGETS:
        raise UsageError(f"target {target!r}", hint="one of " + ", ".join(TARGETS))
    mpicxx = _require_program(
        "mpicxx",
        "is MPI's module named in the site file? Its compiler is in libopenmpi-dev (apt-get) or openmpi-devel (dnf, "
        "then module load mpi/openmpi-x86_64)",
    )
    cuda = target == "cuda" or (
        target == "auto" and _has_device() and _may_use_gpus() and shutil.which("nvcc") is not None
    )
    if cuda:
        nvcc = _require_program("nvcc", "is CUDA's module named in the site file?")
        common = [nvcc, "-x", "cu", "-ccbin", mpicxx, "-Xcompiler", "-fopenmp", "-O3", "-std=c++17"]
        common += _find_libraries(nvcc)
        attempts = [[*common, *code, cublas] for code in _choose_code(compute_capabilities()) for cublas in _CUBLAS]
    else:
        attempts = [[mpicxx, "-O3", "-march=native", "-fopenmp", "-std=c++17"]]
    program = cache_dir() / "fabric" / _key(attempts[0]) / "matmul"
    with _alone(program):
        if not program.exists():
            _compile(attempts, program)
    return program


_CUBLAS = ("-lcublas", "-DNO_CUBLAS")
"""A CUDA installation may come without cuBLAS."""


def _find_libraries(nvcc: str) -> list[str]:
    """Options that name CUDA's libraries, for an nvcc of pip's package nvidia-cuda-nvcc: it searches only lib64."""
    folder = Path(nvcc).resolve().parents[1] / "lib"
    return [f"-L{folder}"] if (folder / "libcudart_static.a").exists() else []


def compute_capabilities() -> list[str]:
    """The compute capabilities of this node's GPUs, each once: ``80``, ``90``; none where the driver does not say."""
    return sorted(
        {f"{major}{minor}" for major, minor in re.findall(r"^(\d+)\.(\d)$", _answer(_ASK_GPUS), re.MULTILINE)}
    )


_ASK_GPUS = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]


def _choose_code(capabilities: Sequence[str]) -> list[list[str]]:
    """Flags of nvcc, the best first: code for the node's GPUs; for all architectures that the compiler knows."""
    own = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in capabilities]
    return [own, ["-arch=all-major"]] if own else [["-arch=all-major"]]


def _require_program(name: str, hint: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise MissingData(f"no {name} in the PATH of {platform.node()}", hint=hint)
    return path


def _has_device() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _may_use_gpus() -> bool:
    """False in a job that has been given no GPU: its CUDA_VISIBLE_DEVICES names none. Unset, it hides none."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1", "NoDevFiles")


def _key(command: list[str]) -> str:
    """Differs where the program must: source, compilers and their versions, MPI, instructions of the CPU."""
    text = [*command, _answer([command[0], "--version"]), _answer(["mpicxx", "-show"])]
    text += [_answer(["mpicxx", "--version"]), _answer(["mpirun", "--version"]), _instructions()]
    return hashlib.sha256(SOURCE.read_bytes() + KERNELS.read_bytes() + "\0".join(text).encode()).hexdigest()[:16]


def _answer(command: list[str]) -> str:
    """The version output of a program; empty if the program is missing."""
    if shutil.which(command[0]) is None:
        return ""
    result = run(command)
    return result.out + result.err


def _instructions() -> str:
    """Properties of the CPU that ``-march=native`` uses."""
    flags = re.search(r"^(?:flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return platform.machine() + (flags[0] if flags else "")


@contextmanager
def _alone(program: Path) -> Iterator[None]:
    """One process at a time: all ranks of a job come here together.

    Where the file system has no locks (Lustre without its mount option flock) each compiles; the last one's file stays.
    """
    make_folder(program.parent)
    with open(program.parent / "lock", "w") as lock:
        lock_file(lock.fileno())
        yield


def _compile(attempts: list[list[str]], program: Path) -> None:
    """Build by the first of ``attempts`` that the compiler accepts, into a temporary file that is renamed."""
    beside = program.with_name(f".matmul.{os.getpid()}")
    for command in attempts:
        line = [*command[:-1], str(SOURCE), command[-1], "-o", str(beside)]  # libraries come after the source
        result = run(line)
        if result.code == 0:
            beside.replace(program)
            return
    tail = "\n".join((result.out + result.err).splitlines()[-_TAIL_LINES:])
    raise BuildError(f"{' '.join(line)} ended with {result.code} on {platform.node()}: {tail}")


def main(argv: list[str]) -> int:
    """Build, print the path; the exit code."""
    try:
        if len(argv) > 1:
            raise UsageError("usage: python -m hpcjobs.fabric.build [auto|cpu|cuda]")
        print(build(*argv))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
