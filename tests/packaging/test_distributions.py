"""A wheel, a wheel built from the sdist and a checkout are the same program."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import hpcjobs

REPOSITORY = Path(__file__).parents[2]
COMMANDS = (
    ("sites",),
    ("sites", "show", "tu-hpc"),
    ("submit", "--site", "local", "--ntasks-per-node", "2", "--dry-run", "ddp", "--workload", "mnist"),
    ("submit", "--site", "nebius-h100", "-N", "2", "--dry-run", "ddp", "--workload", "lm"),
)


def _run(argv: Sequence[str | Path], *, cwd: Path | None = None, **env: str) -> str:
    alone = {
        **os.environ,
        "HPCJOBS_SANDBOX_ROOT": "/var/lib/hpcjobs-none",
    }  # one that comes up meanwhile changes answers
    done = subprocess.run(argv, cwd=cwd, env={**alone, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _build(source: Path, out: Path, *what: str) -> Path:
    """The wheel that ``python -m build`` makes of ``source``, with the build tools installed here."""
    _run([sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", out, source])
    (wheel,) = out.glob("*.whl")
    return wheel


def _copy_of_checkout(folder: Path) -> Path:
    files = _run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=REPOSITORY).split("\0")
    for name in files:
        if name and (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the checkout itself."""
    return _build(REPOSITORY, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def wheel_of_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from an unpacked sdist, which is what a package index hands out."""
    return _build(REPOSITORY, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def clean_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment with the base wheel and what that asks for."""
    folder = tmp_path_factory.mktemp("venv")
    _run([sys.executable, "-m", "venv", "--without-pip", folder])
    python = folder / "bin" / "python"
    _pip(python, "--constraint", str(REPOSITORY / "constraints.txt"), str(wheel))
    return python


def _pip(python: Path, *arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *arguments])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty folder outside the checkout, so that nothing is found beside the current folder."""
    return tmp_path_factory.mktemp("work")


def _answers(python: Path, workplace: Path) -> list[str]:
    """What the commands print, with the places of the installation and the moment taken out."""
    home = {"HOME": str(workplace), "XDG_CONFIG_HOME": str(workplace), "XDG_STATE_HOME": str(workplace)}
    place = _run(
        [python, "-c", "import hpcjobs.data; print(hpcjobs.data.data_folder('templates').parent)"], cwd=workplace
    )
    package = _run([python, "-c", "import hpcjobs; print(hpcjobs.__path__[0])"], cwd=workplace)
    places = [(place.strip(), "SHIPPED"), (package.strip(), "PACKAGE"), (str(python), "PYTHON")]
    result = []
    for arguments in COMMANDS:
        text = _run([python, "-m", "hpcjobs", *arguments], cwd=workplace, USER="tester", COLUMNS="400", **home)
        for path, name in sorted(places, reverse=True):  # what lies inside another place comes before it
            text = text.replace(path, name)
        text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4,8}", "MOMENT", text)
        result.append(re.sub(r"[ ─]+(\n?)", r" \1", text))
    return result


def test_an_installed_wheel_answers_as_the_checkout_does(clean_venv: Path, workplace: Path) -> None:
    """Sites, templates and scripts are the same, wherever they were installed."""
    assert Path(hpcjobs.__file__).parents[1] == REPOSITORY, "these tests run from an editable install of the checkout"
    assert _answers(clean_venv, workplace) == _answers(Path(sys.executable), workplace)


def test_a_wheel_built_from_the_sdist_holds_the_same_files(wheel: Path, wheel_of_sdist: Path) -> None:
    """Nothing that a wheel needs is left out of the sdist."""
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(wheel_of_sdist) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def test_a_wheel_built_from_the_sdist_answers_as_the_checkout_does(
    wheel_of_sdist: Path, clean_venv: Path, workplace: Path
) -> None:
    """Installed in the place of the other one."""
    _pip(clean_venv, "--no-deps", "--force-reinstall", str(wheel_of_sdist))
    assert _answers(clean_venv, workplace) == _answers(Path(sys.executable), workplace)


def test_the_base_install_is_light(clean_venv: Path) -> None:
    """Neither torch nor pandas, nor anything as heavy: submitting needs neither."""
    code = "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions()))"
    installed = set(_run([clean_venv, "-c", code]).split())
    assert "hpcjobs" in installed
    assert installed.isdisjoint({"torch", "pandas", "numpy", "scipy", "matplotlib", "lightning", "psutil", "mlxtend"})
    assert len(installed) < 20, sorted(installed)


def test_the_wheel_ships_data_types_and_licence_and_nothing_else(wheel: Path) -> None:
    """What stands beside the package in a checkout is inside it, and no test, cache or built image is."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"hpcjobs/py.typed", "hpcjobs/_data/templates/job.sh.j2", "hpcjobs/_data/site_configs/local.yaml"} <= names
    assert {"hpcjobs/_data/templates/shell/rank.sh", "hpcjobs/_data/templates/shell/job.bash"} <= names
    assert "hpcjobs/_data/containers/README.md" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    top_level = {name.split("/")[0] for name in names}
    own = f"hpcjobs-{hpcjobs.__version__}"
    assert top_level == {"hpcjobs", "hydra_plugins", f"{own}.dist-info", f"{own}.data"}
    share = {name.removeprefix(f"{own}.data/data/share/") for name in names if ".data/" in name}
    assert {"man/man1/hpcjobs.1", "bash-completion/completions/hpcjobs", "zsh/site-functions/_hpcjobs"} <= share
    shipped = {name.rsplit(".", 1)[-1] for name in names if name.startswith("hpcjobs/_data/")}
    assert shipped <= {"md", "yaml", "yml", "j2", "def", "sh", "bash", "py", "tf", "lua", "tcl", "config"}


def test_two_builds_have_the_same_bytes(wheel_of_sdist: Path, tmp_path: Path) -> None:
    """From another folder, at another time, with files that are younger and readable by fewer."""
    copy = _copy_of_checkout(tmp_path / "elsewhere")
    for path in copy.rglob("*"):
        if path.is_file():
            path.chmod(0o700 if os.access(path, os.X_OK) else 0o600)
    again = _build(copy, tmp_path / "dist")
    for one in wheel_of_sdist.parent.iterdir():
        assert one.read_bytes() == (again.parent / one.name).read_bytes(), one.name


def test_the_manual_page_and_completions_are_those_of_the_commands(tmp_path: Path) -> None:
    """`make share` writes them."""
    _run([sys.executable, REPOSITORY / "tools/share", tmp_path])
    assert {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {
        path.relative_to(REPOSITORY / "share"): path.read_text()
        for path in (REPOSITORY / "share").rglob("*")
        if path.is_file()
    }


def test_recipes_name_what_pyproject_requires(wheel_of_sdist: Path, tmp_path: Path) -> None:
    """For conda-forge, Spack and EasyBuild, with the hash of the sdist."""
    (sdist,) = wheel_of_sdist.parent.glob("*.tar.gz")
    _run([sys.executable, REPOSITORY / "tools/recipes", sdist, "https://example.org/releases", tmp_path])
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    conda = yaml.safe_load((tmp_path / "conda/recipe.yaml").read_text())
    assert conda["source"]["sha256"] == digest
    (typer,) = (line for line in conda["requirements"]["run"] if line.startswith("typer "))
    assert set(typer.removeprefix("typer ").split(",")) == {">=0.26", "<0.29"}
    spack = (tmp_path / "spack/package.py").read_text()
    compile(spack, "package.py", "exec")
    assert 'depends_on("py-typer@0.26:0.28"' in spack
    (easyconfig,) = (tmp_path / "easybuild").iterdir()
    values: dict[str, Any] = {}
    exec(compile(easyconfig.read_text(), "easyconfig", "exec"), values)
    assert [extension[0] for extension in values["exts_list"]][-2:] == ["typer", "hpcjobs"]
    for text in (spack, easyconfig.read_text()):
        assert digest in text


def test_an_ignored_file_beside_the_recipes_is_not_packed(tmp_path: Path) -> None:
    """A container image that somebody built in a checkout has gigabytes."""
    copy = _copy_of_checkout(tmp_path / "checkout")
    (copy / "containers" / "built.sif").write_text("an image")
    with zipfile.ZipFile(_build(copy, tmp_path / "dist")) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".sif")]


def test_the_version_stands_in_one_place(wheel: Path) -> None:
    """The package's ``__version__``, which the wheel's metadata repeats."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    assert headers["Version"] == hpcjobs.__version__
    assert "0.1.0" not in (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def test_every_extra_is_pinned() -> None:
    """Whatever pip may install for the demo and the tests stands in constraints.txt."""
    pinned = {
        re.split(r"[=; ]", line)[0].lower().replace("_", "-")
        for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    metadata = _run([sys.executable, "-c", "import importlib.metadata as m; print(*m.requires('hpcjobs'), sep='\\n')"])
    requirements = {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in metadata.splitlines()}
    assert requirements <= pinned, f"make lock: {sorted(requirements - pinned)}"
