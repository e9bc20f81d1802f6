"""The page about security names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

WHO = {
    *(
        "the user",
        "the centre",
        "a project folder, before trust",
        "a project folder, after trust",
        "other users of a node",
    ),
    *("a run folder of somebody else", "a login host, as seen from a laptop", "Slurm's answers", "a program's output"),
}
"""Who may influence something; each has a row."""
REPOSITORY = Path(__file__).parents[2]


def test_each_row_of_the_page_names_a_test_that_exists() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| who ")]
    assert len(rows) >= 6
    assert {row.split("|")[1].strip() for row in rows} >= WHO
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split("|")), row
        names = re.findall(r"`(tests/[\w/]+\.py)` `(test_\w+)`", row)
        assert names, row
        for file, function in names:
            assert f"def {function}(" in (REPOSITORY / file).read_text(encoding="utf-8"), (file, function)
