"""The shell files that job scripts use on the node: ``templates/shell``, put into the run folder as they are."""

from __future__ import annotations

from hpcjobs.data import data_folder

FOLDER = "shell"
"""In the run folder."""
_ALWAYS = ("common.bash", "job.bash")


def shell_files(script: str) -> dict[str, str]:
    """Name and text of each file that ``script`` uses."""
    folder = data_folder("templates") / FOLDER
    names = sorted(path.name for path in folder.iterdir())
    used = [name for name in names if name in _ALWAYS or f"/{name}" in script]
    return {name: (folder / name).read_text(encoding="utf-8") for name in used}
