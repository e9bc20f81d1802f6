"""Decide for install_horovod.sh whether Horovod is built with NCCL, by the Python and the machine that run this.

Prints a name for the wheel's key and then the variables of the build, a line each; nothing for a build without GPUs.
Where the machine has a GPU and torch is built for CUDA, but something is missing, it prints the reason and ends with 1:
a Horovod without NCCL would send gradients over the host, unnoticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Machine:
    """What the decision depends on. Versions are MAJOR.MINOR; None: there is none."""

    torch_cuda: str | None
    has_gpu: bool
    nvcc: str | None
    nvcc_version: str | None
    nccl_include: str | None
    nccl_lib: str | None
    nccl_version: str | None


class Refusal(Exception):
    """Why Horovod is not built here."""


def choose(machine: Machine) -> list[str]:
    """The name for the key and the variables; empty: without GPUs.

    Raises:
        Refusal: this machine's GPUs would not be used.
    """
    if machine.torch_cuda is None:
        return []
    missing = find_missing(machine)
    if missing:
        if machine.has_gpu:
            raise Refusal(f"torch is built for CUDA {machine.torch_cuda}, and {missing}; --cpu builds without GPUs")
        return []
    assert machine.nvcc is not None
    return [
        f"cuda{machine.nvcc_version}-nccl{machine.nccl_version}",
        "HOROVOD_GPU=CUDA",
        "HOROVOD_GPU_OPERATIONS=NCCL",
        f"HOROVOD_CUDA_HOME={Path(machine.nvcc).parents[1]}",
        f"HOROVOD_NCCL_INCLUDE={machine.nccl_include}",
        f"HOROVOD_NCCL_LIB={machine.nccl_lib}",
        "HOROVOD_NCCL_LINK=SHARED",
    ]


def find_missing(machine: Machine) -> str | None:
    """What the build with NCCL lacks."""
    assert machine.torch_cuda is not None
    if machine.nvcc is None:
        return "there is no nvcc in PATH or CUDA_HOME (module load cuda)"
    if (machine.nvcc_version or "").partition(".")[0] != machine.torch_cuda.partition(".")[0]:
        return f"{machine.nvcc} is of CUDA {machine.nvcc_version}"
    if machine.nccl_include is None:
        return "there is no nccl.h in HOROVOD_NCCL_HOME, NCCL_HOME, /usr/include or the package nvidia-nccl"
    if machine.nccl_lib is None:
        return f"there is no libnccl.so beside {machine.nccl_include}"
    return None


def inspect_machine() -> Machine:
    import torch

    cuda: str | None = torch.version.cuda
    nvcc = find_nvcc()
    include, lib = find_nccl() if cuda is not None else (None, None)
    return Machine(
        torch_cuda=cuda,
        has_gpu=DRIVER.exists(),
        nvcc=nvcc,
        nvcc_version=None if nvcc is None else read_nvcc_version(nvcc),
        nccl_include=include,
        nccl_lib=lib,
        nccl_version=None if include is None else read_nccl_version(Path(include) / "nccl.h"),
    )


def find_nvcc() -> str | None:
    """In CUDA_HOME, else in PATH; by its real place, beside which headers and libraries are."""
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    return None if path is None else os.path.realpath(path)


def read_nvcc_version(nvcc: str) -> str | None:
    output = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout
    release = re.search(r"release (\d+\.\d+)", output)
    return None if release is None else release[1]


def find_nccl() -> tuple[str | None, str | None]:
    """The folders of nccl.h and of libnccl.so."""
    homes = [Path(os.environ[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if os.environ.get(name)]
    places = [(home / "include", home / "lib") for home in homes]
    places += [(Path("/usr/include"), Path(lib)) for lib in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")]
    package = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    for folder in (package.submodule_search_locations if package else None) or ():
        places.append((Path(folder) / "include", Path(folder) / "lib"))
    with_header = [(include, lib) for include, lib in places if (include / "nccl.h").exists()]
    for include, lib in with_header:
        if list(lib.glob("libnccl.so*")):
            return str(include), str(lib)
    return (str(with_header[0][0]), None) if with_header else (None, None)


def read_nccl_version(header: Path) -> str:
    numbers = dict(re.findall(r"#define NCCL_(MAJOR|MINOR|PATCH) (\d+)", header.read_text(encoding="utf-8")))
    return ".".join(numbers.get(part, "0") for part in ("MAJOR", "MINOR", "PATCH"))


def main() -> int:
    try:
        lines = choose(inspect_machine())
    except Refusal as reason:
        print(reason)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
