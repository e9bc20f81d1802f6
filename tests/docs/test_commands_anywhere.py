"""What README and docs/ tell a reader to type on any machine works, and prints what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, REPOSITORY, blocks, indented_commands, tabled_submissions
from typed import checkout, names_of, pages_with, work_through

from hpcjobs.sandbox.services import PACKAGES, apt_line
from hpcjobs.site.library import load_site


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_every_command_says_where_it_runs(page: Path) -> None:
    """No block of commands is left out of the tests unsaid."""
    assert [f"{page}:{block.line}" for block in blocks(page) if block.where is None] == []
    assert indented_commands(page) == []


@pytest.mark.parametrize("command", tabled_submissions(REPOSITORY / "README.md"))
def test_a_command_in_a_table_makes_its_script(command: str) -> None:
    """A site on the other side of the world: what would be sent is as far as a test can go here."""
    dry_run = command.replace("hpcjobs submit", "hpcjobs submit --dry-run", 1)
    env = {**os.environ, "USER": "you", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", dry_run], cwd="/", env=env, capture_output=True, text=True)  # writes nothing
    assert done.returncode == 0, done.stderr
    assert re.search(r"hpcjobs\.(trainers|fabric)\.", done.stdout)


@pytest.mark.parametrize("page", ["docs/sites.md"])
def test_the_site_file_shown_is_one(tmp_path: Path, page: str) -> None:
    """A reader who copies it can submit to it."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    shown = re.findall(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shown
    for name, content in shown:
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert load_site(str(tmp_path / name)).default_partition == "cpu"


def test_the_packages_of_a_sandbox_are_those_it_asks_for() -> None:
    """The line that installs them, as `hpcjobs sandbox up` would say it."""
    shown = (REPOSITORY / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert f" {apt_line(list(PACKAGES))} " in " ".join(shown.replace("\\\n", " ").split())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", pages_with("run"), ids=names_of(pages_with("run")))
def test_commands_for_any_machine_work_as_shown(page: Path, tmp_path: Path) -> None:
    """From a folder like a fresh checkout, by anybody."""
    work_through(page, "run", checkout(tmp_path / "hpcjobs"))
