"""Which Python a program of the user gets where no file names one, and what that Python lacks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commandline import ok

SITE = "partitions: {main: {nodes: 2, node: {cpus: 4}}}\n"
OWN = "imports nowhere_installed, which it lacks"


@pytest.fixture
def program(here: Path) -> Path:
    """A program that needs a package of the user's and a module beside it."""
    (here / "site.yaml").write_text(SITE)
    (here / "beside.py").touch()
    program = here / "train.py"
    program.write_text(
        "import json, nowhere_installed.part as part\nimport beside\nfrom . import x\n"
        "try:\n    import optional_package\nexcept ImportError:\n    pass\n"
    )
    return program


def notes_of(*arguments: str) -> str:
    return ok("submit", "--site", "./site.yaml", "--dry-run", *arguments).err


def test_what_a_program_imports_and_the_python_of_hpcjobs_lacks_is_said_before_it_waits(program: Path) -> None:
    notes = notes_of("train.py")
    assert f"warning: the job runs with {sys.executable}; train {OWN}" in notes
    assert "`environment` (venv or conda), `modules` or `python` of the site file names another" in notes
    assert "--container IMAGE" in notes
    assert "pip" not in notes
    program.write_text("import json, beside\n")
    assert "runs with" not in notes_of("train.py")
    program.write_text("import (\n")
    assert "runs with" not in notes_of("train.py"), "the program says so itself"


@pytest.mark.parametrize(
    ("folder", "receipt", "installer"),
    [
        ("hpcjobs/installed/0.1.0-1f2e.AbCdEf", None, "hpcjobs --remote"),
        ("pipx/venvs/hpcjobs", "pipx_metadata.json", "pipx"),
        ("uv/tools/hpcjobs", "uv-receipt.toml", "uv tool"),
    ],
)
def test_an_environment_that_holds_hpcjobs_alone_is_named(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, receipt: str | None, installer: str
) -> None:
    python = tmp_path / folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    if receipt is not None:
        (tmp_path / folder / receipt).touch()
    monkeypatch.setattr(sys, "executable", str(python))
    notes = notes_of("train.py")
    assert f"warning: the job runs with {python}, which {installer} made for hpcjobs alone; train {OWN}" in notes
    program.write_text("print()\n")
    assert f"hpcjobs: the job runs with {python}, which {installer} made for hpcjobs alone. `environment`" in notes_of(
        "train.py"
    )
    assert "runs with" not in notes_of("./train.sh") if program.with_name("train.sh").touch() else True


@pytest.mark.parametrize("key", ["python: /opt/python", "environment: {venv: /opt/venv}", "modules: [python]"])
def test_a_python_that_the_site_file_names_is_taken_as_it_is(program: Path, key: str) -> None:
    Path("site.yaml").write_text(f"{SITE}{key}\n")
    assert "runs with" not in notes_of("train.py")
