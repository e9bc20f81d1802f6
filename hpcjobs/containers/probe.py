"""Runs in an image, on any Python from 3.8: prints the versions of its software as one line of JSON.

It loads neither torch nor Horovod, which take seconds.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

PACKAGES = ("torch", "horovod", "numpy", "psutil", "lightning", "mpi4py", "mlxtend", "jupyterlab", "ipykernel")
FAMILIES = (("Open MPI", "openmpi"), ("Intel", "intelmpi"))


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def torch_built_with() -> dict[str, str | None]:
    """CUDA and ROCm of torch, from its version file alone: importing torch takes seconds."""
    spec = find_spec("torch")
    facts: dict[str, Any] = {}
    if spec is not None and spec.origin is not None:
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), facts)
    return {"cuda": facts.get("cuda"), "rocm": facts.get("hip")}


def library(*names: str) -> ctypes.CDLL | None:
    """The first of these that loads."""
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    return None


def mpi() -> str | None:
    """Family and version, from the library itself: it answers before MPI_Init."""
    lib = library("libmpi.so.40", "libmpi.so.12", "libmpi.so")
    if lib is None or not hasattr(lib, "MPI_Get_library_version"):
        return None
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()
    lib.MPI_Get_library_version(text, ctypes.byref(length))
    banner = text.value.decode(errors="replace")
    number = re.search(r"\d+\.\d+(\.\d+)?", banner)
    family = next((name for sign, name in FAMILIES if sign in banner), "mpich")
    return f"{family} {number[0] if number else '?'}"


def pmi_types(told_mpi: str | None) -> list[str]:
    """Which types of ``srun --mpi`` this MPI understands."""
    if told_mpi is None:
        return []
    family, _, version = told_mpi.partition(" ")
    if family != "openmpi":
        return ["pmi2"]
    if version.split(".")[0] >= "5":
        return ["pmix"]
    try:
        done = subprocess.run(["ompi_info", "--parsable"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        parts = re.findall(r"^mca:pmix:(\w+):version", done.stdout.decode(errors="replace"), re.MULTILINE)
    except OSError:
        files = glob.glob("/usr/lib*/**/mca_pmix_*.so", recursive=True)
        files += glob.glob("/opt/**/mca_pmix_*.so", recursive=True)
        parts = [re.sub(r".*mca_pmix_(\w+)\.so", r"\1", path) for path in files]
    speaks = {
        "pmix" if "x" in part else "pmi2" for part in parts if part in ("s1", "s2") or re.match(r"(ext|pmix)", part)
    }
    return sorted(speaks)


def pmix() -> str | None:
    """Version of the PMIx library."""
    lib = library("libpmix.so.2", "libpmix.so")
    if lib is None:
        return None
    lib.PMIx_Get_version.restype = ctypes.c_char_p
    number = re.search(r"\d+\.\d+(\.\d+)?", lib.PMIx_Get_version().decode(errors="replace"))
    return number[0] if number else None


def main() -> None:
    """Print one line: the fields of `hpcjobs.containers.images.ImageFacts`."""
    packages = versions()
    told_mpi = mpi()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "horovod": packages.get("horovod"),
        "mpi": told_mpi,
        "pmi": pmi_types(told_mpi),
        "pmix": pmix(),
        "glibc": platform.libc_ver()[1] or None,
        "packages": packages,
    }
    facts.update(torch_built_with())
    sys.stdout.write("\n" + json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
