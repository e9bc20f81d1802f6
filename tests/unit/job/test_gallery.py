"""Site files of public systems: where their facts are from, and the script that each gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts_here import as_recorded, planned, without_complaint

import hpcjobs
from hpcjobs.job.models import Plan
from hpcjobs.site.search import gallery_folder

FILES = sorted(gallery_folder().glob("*.yaml"))
PROGRAM = ("train.py", "--epochs", "3")
SUBMISSIONS: dict[str, dict[str, object]] = {
    "clariden": {"nodes": 4, "time": "12h", "account": "a-project"},
    "delta": {"nodes": 2, "time": "8h", "account": "bxyz-delta-gpu"},
    "frontier": {"nodes": 8, "time": "2h", "account": "ABC123"},
    "hpcfund": {"nodes": 2, "time": "8h"},
    "isambard-ai": {"nodes": 8, "time": "1-00:00:00"},
    "kestrel": {"nodes": 2, "time": "4h", "account": "handle"},
    "leonardo": {"nodes": 16, "time": "1-00:00:00", "account": "EUHPC_X00_000"},
    "lumi": {"nodes": 4, "time": "1-00:00:00", "account": "project_465000000"},
    "perlmutter": {"nodes": 4, "time": "6h", "account": "m0000_g"},
    "roihu": {"nodes": 4, "time": "30m", "account": "project_2000000"},
    "snellius": {"nodes": 2, "time": "8h"},
    "vista": {"nodes": 8, "time": "1-00:00:00", "account": "ABC12345"},
    "wice": {"nodes": 2, "time": "8h", "account": "lp_project"},
}
"""What a user of each system would ask for to train on several nodes; the rest is the file's."""


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("USER", "ada")
    (here / "train.py").touch()


def submission(name: str) -> Plan:
    site = hpcjobs.load_site(name)
    launcher = (site.launchers or ("srun",))[0]
    return planned(name, launcher, *PROGRAM, **{"ntasks_per_node": None, **SUBMISSIONS[name]})


def test_the_gallery_has_a_submission_for_each_of_its_systems() -> None:
    assert [file.stem for file in FILES] == list(SUBMISSIONS)
    assert len(FILES) >= 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_first_lines_name_the_pages_that_the_facts_are_from_and_when_they_were_read(file: Path) -> None:
    head = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    sources = [line for line in head if line.startswith("# Source: ")]
    assert head[: len(sources)] == sources
    assert all(re.match(r"# Source: [^,].*, https://\S+", line) for line in sources)
    assert re.match(r"# Read: \d{4}-\d\d-\d\d, ", head[len(sources)])
    assert any(line.startswith("# Yours: ") for line in head)


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_the_script_of_a_training_on_several_nodes_is_the_recorded_one(name: str) -> None:
    """In its difference to that of tu-hpc."""
    as_recorded(submission(name), f"gallery/{name}", planned("tu-hpc", "srun", *PROGRAM))


def test_bash_and_shellcheck_have_no_complaint_about_the_scripts_of_the_gallery(tmp_path: Path) -> None:
    without_complaint([submission(name).script for name in SUBMISSIONS], tmp_path)
