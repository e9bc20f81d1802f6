"""docs/job_script.md shows the script as it is rendered, with an explanation between its parts."""

from __future__ import annotations

import re

from pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "job_script.md"
SCRIPT = REPOSITORY / "tests" / "data" / "golden" / "tu-hpc-srun.sh"  # a unit test compares it with what is rendered


def test_the_parts_on_the_page_are_the_whole_script_in_its_order() -> None:
    parts = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    shown = "".join(parts).splitlines()
    script = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert shown == [line for line in script if line]


def test_every_file_that_scripts_use_is_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    missing = [path.name for path in (REPOSITORY / "templates" / "shell").iterdir() if f"`{path.name}`" not in text]
    assert missing == []
