"""What README and docs/ tell a reader to type on a cluster works, and prints what they show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared import shared_folder
from typed import checkout, names_of, pages_with, work_through

from hpcjobs import sandbox
from hpcjobs.sandbox.services import is_debian, missing_packages


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all hosts of a sandbox see, with no sandbox before or after; skipped where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("a sandbox needs root")
    if not is_debian() or missing_packages():
        pytest.skip(f"a sandbox needs Debian or Ubuntu with {' '.join(missing_packages())}")
    if sandbox.status().state == "up":
        pytest.skip("a sandbox is up; it is left alone")
    with shared_folder() as folder:
        yield folder
        sandbox.down()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages_with("run: sandbox"), ids=names_of(pages_with("run: sandbox")))
def test_commands_for_a_sandbox_work_as_shown(page: Path, folder: Path) -> None:
    """On a real Slurm, which the page itself brings up and takes down."""
    began = work_through(page, "run: sandbox", checkout(folder / "hpcjobs"))
    if page.name == "cluster.md":  # of an unknown cluster: three commands to a job that has ended, within a minute
        first, last = (list(began).index(command) for command in ("hpcjobs sites init ours", "hpcjobs submit --wait"))
        assert last - first == 2
        assert list(began.values())[last + 1] - list(began.values())[first] < 60
