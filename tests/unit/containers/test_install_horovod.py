"""containers/install_horovod.sh where Horovod cannot be built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcjobs.data import data_folder

PYTHON = r"""#!/bin/bash
# A Python with torch and without Horovod, whose pip does what the file beside it says.
case "$*" in
    *'version("torch")'*) echo 9.9 ;;
    *'cp%d%d'*) echo cp399 ;;
    *sys.prefix*) echo "${0%/*}" ;;
    '- '*) exit 1 ;; # Horovod does not load
    *horovod_gpu.py) cat "${0%/*}/gpu"; [[ ! -e ${0%/*}/refused ]] || exit 1 ;;
    '-m pip download'*)
        dest=$(sed 's/.*--dest \([^ ]*\).*/\1/' <<<"$*")
        headers=$dest/horovod-0.28.1/third_party/flatbuffers/include/flatbuffers
        mkdir -p "$headers"
        echo 'const size_type count_;' >"$headers/stl_emulation.h"
        tar -czf "$dest/horovod-0.28.1.tar.gz" -C "$dest" horovod-0.28.1
        ;;
    '-m pip wheel'*)
        env | grep '^HOROVOD_' >"${0%/*}/variables"
        cp "${*: -1}/third_party/flatbuffers/include/flatbuffers/stl_emulation.h" "${0%/*}/built.h"
        echo 'error: the compiler is too new' >&2
        exit 1
        ;;
esac
"""


@pytest.fixture
def python(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python on a machine that has compilers and Open MPI; no build succeeds."""
    stubs = here / "stubs"
    stubs.mkdir()
    for name in ("mpicxx", "mpirun", "cmake", "make", "g++"):
        (stubs / name).write_text("#!/bin/sh\n")
        (stubs / name).chmod(0o755)
    (stubs / "python").write_text(PYTHON)
    (stubs / "python").chmod(0o755)
    (stubs / "gpu").touch()
    monkeypatch.setenv("PATH", f"{stubs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HPCJOBS_WHEELS", str(here / "wheels"))
    monkeypatch.delenv("CXX", raising=False)
    return stubs / "python"


def install(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    script = data_folder("containers") / "install_horovod.sh"
    return subprocess.run(["bash", script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("option", [("--optional",), ("--optional", "--wheel")])
def test_a_build_that_fails_is_no_error_where_horovod_is_optional(python: Path, option: tuple[str, ...]) -> None:
    """`make test` goes on, and the tests of Horovod say that it is not there."""
    done = install(*option, python)
    assert done.returncode == 0, done
    assert "no Horovod: it did not build" in done.stdout
    assert (python.parent / ".no-horovod").read_text() == "it did not build; see above\n"


def test_a_build_that_fails_is_an_error_where_horovod_is_asked_for(python: Path) -> None:
    done = install(python)
    assert done.returncode == 1
    assert "error: it did not build" in done.stderr
    assert not (python.parent / ".no-horovod").exists()


def test_the_source_that_is_built_assigns_to_no_constant(python: Path) -> None:
    """GCC 14 refuses it."""
    install(python)
    assert (python.parent / "built.h").read_text() == "size_type count_;\n"


def test_with_nccl_the_build_has_its_variables_and_the_wheel_a_key_of_its_own(python: Path, here: Path) -> None:
    (python.parent / "gpu").write_text("cuda12.6-nccl2.26.2\nHOROVOD_GPU_OPERATIONS=NCCL\nHOROVOD_NCCL_HOME=/a b\n")
    install(python)
    variables = (python.parent / "variables").read_text().splitlines()
    assert {"HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_NCCL_HOME=/a b", "HOROVOD_WITH_MPI=1"} <= set(variables)
    (wheels,) = (here / "wheels").iterdir()
    assert wheels.name.endswith("-cuda12.6-nccl2.26.2")
    install("--cpu", python)
    assert "GPU" not in (python.parent / "variables").read_text()
    assert len(list((here / "wheels").iterdir())) == 2


def test_a_machine_whose_gpus_would_not_be_used_is_refused_with_the_reason(python: Path) -> None:
    (python.parent / "gpu").write_text("torch is built for CUDA 12.8, and there is no nvcc\n")
    (python.parent / "refused").touch()
    done = install(python)
    assert done.returncode == 1
    assert "error: torch is built for CUDA 12.8, and there is no nvcc" in done.stderr
    done = install("--optional", python)
    assert done.returncode == 0
    assert "no Horovod: torch is built for CUDA 12.8" in done.stdout
