"""Scripts that install, on machines that are not this one: Rocky Linux, a GPU. The machine's programs are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = ("bash", "cat", "cut", "dirname", "env", "rm", "sha256sum", "touch")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of a checkout that tools/venv needs, and bin/ with the programs of the machine."""
    (tmp_path / "tools").mkdir()
    for name in ("tools/venv", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        (tmp_path / "bin" / name).symlink_to(program)
    return tmp_path


def stand_in(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def venv(checkout: Path) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(checkout / "bin"), "HOME": os.environ["HOME"]}
    return subprocess.run([checkout / "tools/venv", "demo"], env=env, capture_output=True, text=True, timeout=60)


def test_rocky_linux_with_python_3_9_is_told_which_python_to_install(checkout: Path) -> None:
    stand_in(checkout / "bin/python3", '[ "$1" = --version ] && echo Python 3.9.18')
    stand_in(checkout / "bin/dnf", "exit 1")
    done = venv(checkout)
    assert done.returncode == 1
    assert "no Python 3.10 or newer (Python 3.9.18)" in done.stderr
    assert "dnf install -y python3.12    # before 9.4 and 8.10: python3.11" in done.stderr
    assert "apt-get" not in done.stderr


def test_rocky_linux_without_apptainer_is_told_where_it_is(checkout: Path) -> None:
    stand_in(checkout / "bin/dnf", "exit 1")
    script = REPOSITORY / "containers/install_apptainer.sh"
    env = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    done = subprocess.run(["bash", script, checkout / "prefix"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "dnf install -y epel-release && dnf install -y apptainer" in done.stderr


def test_rocky_linux_without_a_compiler_is_told_the_names_of_its_packages(checkout: Path) -> None:
    stand_in(checkout / "bin/dnf", "exit 1")
    python = """
    case $* in
        -\\ *) exit 1 ;; # Horovod does not load
        *Python.h*) exit 1 ;;
        *version_info*) echo python3.12-devel ;;
        *) echo 9.9 ;;
    esac"""
    stand_in(checkout / "bin/python", python)
    script = REPOSITORY / "containers/install_horovod.sh"
    env = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    done = subprocess.run(["bash", script, "python"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "As root: dnf install -y " in done.stderr
    for name in ("gcc-c++", "openmpi-devel", "python3.12-devel"):
        assert f" {name}" in done.stderr


def test_what_is_there_is_not_installed_again(checkout: Path) -> None:
    stand_in(checkout / ".venv/bin/python", f'echo "$@" >>{checkout}/asked')
    assert venv(checkout).returncode == 0
    assert "--editable .[train,digits]\n" in (checkout / "asked").read_text()
    installs = (checkout / "asked").read_text().count("--editable")
    assert venv(checkout).returncode == 0
    assert (checkout / "asked").read_text().count("--editable") == installs, "installed twice"
