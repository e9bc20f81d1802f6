"""Keeps files of somebody's repository from acting until the user has trusted their content.

The author of a site file decides which commands run under the user's name: shell lines, modules, Python, options of
sbatch and srun, even the plugins that Slurm's commands load (``slurm_conf``). So a file of the project layer may only
describe a cluster, until its content is trusted. A job template and a container recipe of the current folder, which a
command finds by itself, need trust for their complete content.
"""

from __future__ import annotations

import hashlib
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.errors import ConfigError, reason_of
from hpcjobs.files import AppendStore, leads_elsewhere
from hpcjobs.site.resources import fields_where
from hpcjobs.site.search import layer_of
from hpcjobs.site.yaml_file import Steps, YamlFile, where_of

_DESCRIBING = frozenset((
    *("extends", "description", "cluster", "scheduler", "partitions", "defaults", "qos", "default_qos", "launchers"),
    *("gpu_request", "memory_request", "max_submit_jobs", "retries", "signal_before", "prices", "watts"),
    *("required", "licenses", "chooses_partition"),
))  # fmt: skip
"""Keys of a site file that run, read or write no files. A key that is missing here needs trust."""


def acting_keys(file: YamlFile) -> list[Steps]:
    """The keys of ``file`` that need trust."""
    tree = file.tree if isinstance(file.tree, dict) else {}
    keys: list[Steps] = [(key,) for key in tree if key not in _DESCRIBING]
    partitions = tree.get("partitions")
    owners: dict[Steps, Any] = {(): tree}
    if isinstance(partitions, dict):
        owners |= {("partitions", name): partition for name, partition in partitions.items()}
    for steps, owner in owners.items():
        defaults = owner.get("defaults") if isinstance(owner, dict) else None
        keys += [
            (*steps, "defaults", key) for key in fields_where("acts") if isinstance(defaults, dict) and key in defaults
        ]
    return keys


def list_untrusted(files: Sequence[YamlFile]) -> tuple[str, ...]:
    """Return ``file:line: key`` of each key that must not act, from untrusted files of a project."""
    keys = ((file, steps) for file in untrusted_files(files) for steps in acting_keys(file))
    return tuple(f"{where_of(file, steps)}: {'.'.join(map(str, steps))}" for file, steps in keys)


def untrusted_files(files: Sequence[YamlFile]) -> Iterator[YamlFile]:
    """Those of a project that need trust and have not got it."""
    candidates = [file for file in files if layer_of(file.path) == "project" and acting_keys(file)]
    hashes = read_trusted() if candidates else {}
    yield from (file for file in candidates if not _is_among(hashes, file.path, file.text))


def is_project_folder(folder: Path, *others: Path) -> bool:
    """Whether ``folder`` belongs to the current folder, and not to the user or to hpcjobs."""
    return os.path.realpath(folder) not in {os.path.realpath(other) for other in others}


def is_trusted(path: Path, text: str) -> bool:
    """Whether the user trusts ``path`` with the content ``text``."""
    return _is_among(read_trusted(), path, text)


def was_trusted(path: Path) -> bool:
    """Whether the user trusts ``path`` with some content, which may be another one than it has now."""
    return _key(path) in read_trusted()


def _is_among(hashes: Mapping[str, str], path: Path, text: str) -> bool:
    """A link of somebody else to a trusted file is not: the file's relative words mean another folder there."""
    return hashes.get(_key(path)) == _hash(text) and not leads_elsewhere(path)


def refusal_of_file(kind: str, path: Path) -> ConfigError:
    """Return the reason why an untrusted file of this ``kind`` cannot be used; all its content acts."""
    return ConfigError(
        f"{kind} {path} belongs to a project and is not trusted as it is now",
        hint=f"read it, then `hpcjobs sites trust {shlex.quote(str(path))}`",
    )


def refusal_of_plan(lines: Sequence[str]) -> ConfigError:
    """Why a plan that was made by untrusted files, ``lines``, cannot be submitted."""
    shown = "".join(f"\n  {line}" for line in lines)
    return ConfigError(
        f"the plan was made by files of a project that were not trusted:{shown}",
        hint="read them, then `hpcjobs sites trust`, and plan anew",
    )


def refusal(path: Path, keys: Sequence[str]) -> ConfigError:
    """Why a site of untrusted files cannot be used."""
    shown = "".join(f"\n  {key}" for key in keys)
    return ConfigError(
        f"site file {path} belongs to a project and is not trusted as it is now; it sets what acts as you:{shown}",
        hint=f"read it, then `hpcjobs sites trust {shlex.quote(str(path))}`;"
        " submit --dry-run prints the script without trust",
    )


class _Trust(msgspec.Struct, frozen=True):
    """A line of the record: a file is trusted, or no longer."""

    path: str
    sha256: str | None
    """Digest of the trusted content; None: no longer trusted."""
    time: float
    """Seconds since 1970; later than all lines before, whatever the clocks of the hosts."""


def trust_file(path: Path, text: str) -> None:
    """Trust the file ``path`` with the content ``text``. Raises ConfigError: the record cannot be read or written."""
    _append(path, _hash(text))


def forget_file(path: Path) -> bool:
    """Trust the file no longer; whether it was trusted. Raises ConfigError: the record cannot be read or written."""
    if is_undone := was_trusted(path):
        _append(path, None)
    return is_undone


def read_trusted() -> dict[str, str]:
    """SHA-256 of the content of each trusted file, by its path. Raises ConfigError: the record cannot be read."""
    newest = {line.path: line.sha256 for line in _read_lines()}
    return {path: sha256 for path, sha256 in newest.items() if sha256 is not None}


def _read_lines() -> list[_Trust]:
    """The lines of all hosts, by time. Raises ConfigError for a damaged line: it may have ended the trust in a file."""
    try:
        lines = [msgspec.json.decode(line.text, type=_Trust) for line in _store().read()]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(reason_of(error)) from error
    return sorted(lines, key=lambda line: line.time)


def _append(path: Path, sha256: str | None) -> None:
    newest = max((line.time for line in _read_lines()), default=0.0)
    line = _Trust(_key(path), sha256, max(time.time(), math.nextafter(newest, math.inf)))
    try:
        _store().append([msgspec.json.encode(line).decode()])
    except OSError as error:
        raise ConfigError(f"{_store().folder}: cannot be written: {reason_of(error)}") from error


def _store() -> AppendStore:
    return AppendStore("trusted")


def _unreadable(reason: str) -> ConfigError:
    return ConfigError(
        f"{_store().folder}: the record of trusted site files cannot be read: {reason}",
        hint="remove it, and trust the files anew",
    )


def _key(path: Path) -> str:
    return os.path.realpath(path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
