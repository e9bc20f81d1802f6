"""Finds the project file of a folder, and the site that it names for every command in that folder."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path

from hpcjobs.errors import ConfigError, HpcJobsWarning
from hpcjobs.site.trust import is_trusted
from hpcjobs.site.yaml_file import read_file

PROJECT_FILE = "hpcjobs.yaml"


def find_project(folder: Path | None = None) -> Path | None:
    """The project file of ``folder`` [here]: in it, or in a parent up to the root of its repository; None: none."""
    here = (folder or Path.cwd()).absolute()
    parents = [here, *here.parents]
    root = next((number for number, parent in enumerate(parents) if os.path.exists(parent / ".git")), 0)
    for parent in parents[: root + 1]:
        if os.path.isfile(path := parent / PROJECT_FILE):
            return path
        if os.path.isfile(other := parent / "hpcjobs.yml"):
            warnings.warn(f"{other} is not read: a project file is named {PROJECT_FILE}", HpcJobsWarning, stacklevel=2)
    return None


def is_ours(path: Path) -> bool:
    """Whether a project file belongs to the user or the system, or is trusted."""
    if path.stat().st_uid in (0, os.getuid()):
        return True
    with suppress(ConfigError):  # another user's invalid file stops no command
        return is_trusted(path, read_file(path).text)
    return False


def read_site_name(path: Path) -> str | None:
    """The site that a project file names; None where it names none, or where it is another user's and not trusted.

    Raises:
        ConfigError: the file is no YAML, or ``site`` is not a name.
    """
    tree = read_file(path).tree if is_ours(path) else {}
    name = tree.get("site") if isinstance(tree, dict) else None
    if name is None:
        return None
    try:
        return check_site_name(name)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def project_jobs(folder: Path) -> list[str]:
    """Names of the jobs of the folder's project file; none where it has none, or cannot be used."""
    try:
        path = find_project(folder)
        tree = read_file(path).tree if path is not None and is_ours(path) else {}
    except (ConfigError, OSError):
        return []
    jobs = tree.get("jobs") if isinstance(tree, dict) else None
    return [name for name in jobs if isinstance(name, str)] if isinstance(jobs, dict) else []


def check_site_name(name: object) -> str:
    """``name``, if it names a site and not a file.

    Raises:
        ValueError: it is a path, or no text.
    """
    if not isinstance(name, str):
        raise ValueError(f"site {name!r} is no text")
    if "/" in name or name.endswith((".yaml", ".yml")):
        raise ValueError(f"site {name!r} is a path; a project file names a site")
    return name
