"""Site files of a test: where the user's own are, and how one is written."""

from __future__ import annotations

from pathlib import Path


def user_folder() -> Path:
    """The user's own site files: those of a project would have to be trusted."""
    return Path.home() / ".config" / "hpcjobs" / "site_configs"


def write_site(folder: Path, name: str, text: str) -> Path:
    """The file of site ``name`` in ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / f"{name}.yaml"
