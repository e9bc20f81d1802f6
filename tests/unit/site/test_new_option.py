"""One line in the table of sbatch's options is a new option everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcjobs

ROW = """
    colour: Annotated[Text, _own("Colour of the nodes.", None, LocalEffect.REFUSED, section="Resources",
        update="Colour", variable="COLOUR", acts=True)] = UNSET
    shade: Annotated[Text, _own("Shade of the colour.")] = UNSET
"""
SITE = {"a": {"nodes": 4, "node": {"cpus": 8}}}
PAGES = "from hpcjobs.site import schema; " + "; ".join(
    f"print({text})" for text in ("schema.sbatch_page()", "schema.keys_page()", "schema.schema_text()")
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package whose table has one entry more."""
    package = Path(hpcjobs.__file__).parent
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(package, folder / "hpcjobs", ignore=shutil.ignore_patterns("__pycache__"))
    for data in ("templates", "site_configs", "containers"):
        if (package.parent / data).is_dir():
            (folder / data).symlink_to(package.parent / data)
    table = folder / "hpcjobs" / "site" / "resources.py"
    text = table.read_text(encoding="utf-8")
    table.write_text(text.replace("    # fmt: on\n", f"{ROW}    # fmt: on\n", 1), encoding="utf-8")
    (folder / "c.yaml").write_text(json.dumps({"partitions": SITE}))
    (folder / "d.yaml").write_text(json.dumps({"partitions": SITE, "defaults": {"colour": "blue"}}))
    (folder / "job.yaml").write_text("resources: {colour: blue}\n")
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --colour=blue\ntrue\n")
    return folder


def run(copy: Path, *command: str, code: int = 0, **variables: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(copy), **variables}
    done = subprocess.run([sys.executable, *command], cwd=copy, env=env, capture_output=True, text=True)
    assert done.returncode == code, done
    return done.stdout + done.stderr


def submit(copy: Path, *arguments: str, code: int = 0, **variables: str) -> str:
    return run(copy, "-m", "hpcjobs", "submit", "--dry-run", *arguments, code=code, **variables)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--site", "./c.yaml", "--colour", "blue", "true"),
        ("--site", "./c.yaml", "--colour=blue", "true"),
        ("--site", "./c.yaml", "-o", "colour=blue", "true"),
        ("--site", "./c.yaml", "--spec", "job.yaml", "true"),
        ("--site", "./d.yaml", "true"),
        ("--site", "./c.yaml", "job.sh"),
    ],
    ids=["flag", "flag-equals", "by-name", "spec", "site", "batch-script"],
)
def test_it_reaches_the_script_from_every_source(copy: Path, arguments: tuple[str, ...]) -> None:
    assert "#SBATCH --colour=blue\n" in submit(copy, *arguments)


def test_it_is_read_from_the_environment(copy: Path) -> None:
    assert "#SBATCH --colour=red\n" in submit(copy, "--site", "./c.yaml", "true", SBATCH_COLOUR="red")


@pytest.mark.parametrize("verb", ["submit", "alloc", "scale", "rerun"])
def test_help_has_its_line(copy: Path, verb: str) -> None:
    assert "Colour of the nodes." in run(copy, "-m", "hpcjobs", verb, "--help")


def test_the_local_queue_refuses_it_as_its_entry_says(copy: Path) -> None:
    assert "colour=blue (flag)" in run(
        copy, "-m", "hpcjobs", "submit", "--site", "local", "--colour", "blue", "true", code=5
    )


def test_pages_and_schema_have_it(copy: Path) -> None:
    text = run(copy, "-c", PAGES)
    assert "| `--colour=VALUE` | own option | refused | Colour of the nodes. |" in text
    assert "| `colour` | `str or None` |  | Colour of the nodes. |" in text
    assert '"description": "Colour of the nodes."' in text


def test_an_option_that_the_help_leaves_out_is_completed_from_its_beginning(copy: Path) -> None:
    typed = {"COMP_WORDS": "hpcjobs submit --shad", "COMP_CWORD": "2", "_HPCJOBS_COMPLETE": "complete_bash"}
    assert "--shade" in run(copy, "-m", "hpcjobs", **typed)
    assert "--shade" not in run(copy, "-m", "hpcjobs", **(typed | {"COMP_WORDS": "hpcjobs submit --"}))
    assert run(copy, "-c", "from hpcjobs.cli.completion import complete_settings as c; print(c('sha'))").strip() == "[]"


def test_update_and_completion_and_trust_have_it(copy: Path) -> None:
    checks = (
        "from hpcjobs.cli.completion import complete_settings; from hpcjobs.run.control import KEYS;"
        "from hpcjobs.site.resources import fields_where;"
        "print(complete_settings('col'), KEYS['colour'], 'colour' in fields_where('acts'))"
    )
    assert run(copy, "-c", checks).strip() == "['colour='] Colour True"
