"""containers/install_horovod.sh where Horovod cannot be built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcjobs.data import shipped

PYTHON = r"""#!/bin/bash
# A Python with torch and without Horovod, whose pip does what the file beside it says.
case "$*" in
    *'version("torch")'*) echo 9.9 ;;
    *'cp%d%d'*) echo cp399 ;;
    *sys.prefix*) echo "${0%/*}" ;;
    '- '*) exit 1 ;; # Horovod does not load
    '-m pip download'*)
        dest=$(sed 's/.*--dest \([^ ]*\).*/\1/' <<<"$*")
        headers=$dest/horovod-0.28.1/third_party/flatbuffers/include/flatbuffers
        mkdir -p "$headers"
        echo 'const size_type count_;' >"$headers/stl_emulation.h"
        tar -czf "$dest/horovod-0.28.1.tar.gz" -C "$dest" horovod-0.28.1
        ;;
    '-m pip wheel'*)
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
    monkeypatch.setenv("PATH", f"{stubs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HPCJOBS_WHEELS", str(here / "wheels"))
    monkeypatch.delenv("CXX", raising=False)
    return stubs / "python"


def install(*words: str | Path) -> subprocess.CompletedProcess[str]:
    script = shipped("containers") / "install_horovod.sh"
    return subprocess.run(["bash", script, *words], capture_output=True, text=True, check=False)


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
