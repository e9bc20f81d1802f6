"""The table of sbatch's options, against this machine's sbatch and the page that prints it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcjobs.site.models import Resources
from hpcjobs.site.resources import ALIASES, FIELDS, OPTIONS, Argument, Treatment
from hpcjobs.site.schema import sbatch_page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sbatch_options.md"


def sbatch(tmp_path: Path, *arguments: str) -> str:
    """What this machine's sbatch prints, for which a configuration with a name is enough."""
    if shutil.which("sbatch") is None:
        pytest.skip("no sbatch here")
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    env = {**os.environ, "SLURM_CONF": str(conf)}
    done = subprocess.run(["sbatch", *arguments], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def test_every_option_that_sbatch_prints_here_is_in_the_table(tmp_path: Path) -> None:
    printed = re.findall(r"^\s+(?:-(\w), )?--([a-z][a-z0-9-]+)(\[=|=)?", sbatch(tmp_path, "--help"), re.MULTILINE)
    assert len(printed) > 60
    missing = [name for _, name, _ in printed if name not in OPTIONS]
    letters = [(name, letter) for letter, name, _ in printed if letter and OPTIONS[name].short != letter]
    assert (missing, letters) == ([], [])


def test_sbatch_here_knows_every_option_of_the_table_with_or_without_a_value(tmp_path: Path) -> None:
    newer = not sbatch(tmp_path, "--version").startswith("slurm-wlm 22.05")
    for option in OPTIONS.values():
        answer = sbatch(tmp_path, f"--{option.name}=1", "--usage")
        is_known = "unrecognized option '" not in answer
        if not option.versions:
            assert is_known, option.name
            assert ("doesn't allow an argument" in answer) is (option.argument is Argument.NONE), option.name
        elif not newer and option.versions.startswith("after"):
            assert not is_known or option.name == "extra", option.name  # which abbreviates another one there


def test_own_options_are_the_fields_of_a_request() -> None:
    assert tuple(FIELDS) == Resources.__struct_fields__
    assert set(ALIASES.values()) <= set(OPTIONS)
    assert all(option.reason for option in OPTIONS.values() if option.treatment is Treatment.REFUSED)


def test_the_page_of_options_is_made_from_the_table() -> None:
    if os.environ.get("GOLDEN") == "write":
        PAGE.write_text(sbatch_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == sbatch_page()
