"""The page of environment variables names every variable that hpcjobs reads or sets."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_NAME = re.compile(r"\bHPCJOBS_[A-Z][A-Z_]*[A-Z]\b")
PARAMETERS = {"HPCJOBS_PARAM_LR", "HPCJOBS_PARAM_NAME"}
"""Variables of a sweep's parameters, whose names are those of the user."""
OF_CLICK = {"HPCJOBS_COMPLETE"}
"""Set by the completion script of a shell."""


def names_in(*folders: str) -> set[str]:
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
    texts = (path.read_bytes().decode(errors="replace") for path in files if "__pycache__" not in path.parts)
    return {name for text in texts for name in _NAME.findall(text.replace("_HPCJOBS_COMPLETE", ""))}


def test_every_variable_of_the_code_is_on_the_page_and_no_other() -> None:
    page = set(_NAME.findall((REPOSITORY / "docs/environment.md").read_text(encoding="utf-8")))
    code = names_in("hpcjobs", "templates", "containers/install_horovod.sh") | {"HPCJOBS_WHEELS"}
    assert page - PARAMETERS == code - PARAMETERS - OF_CLICK
