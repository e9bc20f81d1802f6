"""Chooses the path of a new site file, and writes it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hpcjobs.discovery.facts import ClusterFacts
from hpcjobs.discovery.partitions import is_name
from hpcjobs.errors import ConfigError, RequestError, reason_of
from hpcjobs.files import config_dir, write_beside
from hpcjobs.site.schema import FILE_NAME, schema_text


def default_name(cluster: ClusterFacts) -> str:
    """ClusterName, in characters that the name of a site can have.

    Raises:
        RequestError: the cluster has no name.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", cluster.config.cluster or "")
    if not is_name(name):
        raise RequestError("scontrol show config names no ClusterName", hint="use hpcjobs sites init NAME")
    return name


def choose_path(name: str | None, file: Path | None, *, force: bool) -> Path:
    """The file to write: ``file``, else ``NAME.yaml`` among the user's site files.

    Raises:
        RequestError: neither can be the name of a site, or the file exists and ``force`` is not given.
    """
    path = (config_dir() / "site_configs" / f"{name}.yaml") if file is None else file.expanduser().absolute()
    if file is not None and path.suffix != ".yaml":
        raise RequestError(f"--file {file}: a site file is called NAME.yaml")
    if file is not None and name is not None and path.stem != name:
        raise RequestError(
            f"site {name!r} and --file {file}: the name of the file is the site's name", hint=f"--file {name}.yaml"
        )
    if not is_name(name if file is None and name is not None else path.stem):
        raise RequestError(
            f"site name {name if name is not None else path.stem!r}: use letters, digits, '_', '.', '-', "
            "and start with a letter or digit"
        )
    _refuse_existing(path, force=force)
    return path


def save_text(path: Path, text: str, *, force: bool) -> None:
    """Write the file in one step, and beside it the schema that its first line names, for editors.

    Raises:
        RequestError: it exists and ``force`` is not given. ConfigError: it cannot be written.
    """
    _refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path.parent / FILE_NAME, schema_text(), mode=None)
        write_beside(path, text, mode=None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {reason_of(error)}") from error


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise RequestError(f"{path} is a folder")
    if os.path.lexists(path) and not force:
        raise RequestError(
            f"{path} exists", hint="--force replaces it, --dry-run prints the new file, NAME chooses another"
        )
