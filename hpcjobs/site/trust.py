"""Keeps files of somebody's repository from acting until the user has trusted their content.

Whoever writes a site file decides what runs under the user's name: shell lines, modules, the Python, options of sbatch
and srun, even the plugins that Slurm's commands load (``slurm_conf``). So a file of the project layer may only describe
a cluster, until its content is trusted. A job template and a container recipe of the current folder, whose names a
command finds by itself, need trust as they are.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.errors import ConfigError, reason_of, warn_without_locks
from hpcjobs.files import lock_file, state_dir, write_beside
from hpcjobs.site.resources import fields_where
from hpcjobs.site.search import layer_of
from hpcjobs.site.yaml_file import Steps, YamlFile, where_of

_DESCRIBING = frozenset((
    *("extends", "description", "cluster", "scheduler", "partitions", "defaults", "qos", "default_qos", "launchers"),
    *("gpu_request", "memory_request", "max_submit_jobs", "retries", "signal_before", "prices", "watts"),
    *("required", "licenses", "chooses_partition"),
))  # fmt: skip
"""Keys of a site file by which nothing is run, read or written. A key that is missing here needs trust."""


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
    """``file:line: key`` of each key that may not act, of a project's files that are not trusted as they are."""
    keys = ((file, steps) for file in untrusted_files(files) for steps in acting_keys(file))
    return tuple(f"{where_of(file, steps)}: {'.'.join(map(str, steps))}" for file, steps in keys)


def untrusted_files(files: Sequence[YamlFile]) -> Iterator[YamlFile]:
    """Those of a project that need trust and have not got it."""
    candidates = [file for file in files if layer_of(file.path) == "project" and acting_keys(file)]
    hashes = read_trusted() if candidates else {}
    yield from (file for file in candidates if hashes.get(_key(file.path)) != _hash(file.text))


def is_project_folder(folder: Path, *others: Path) -> bool:
    """Whether ``folder``, of the current folder, is none of ``others``: the user's and the shipped ones."""
    return os.path.realpath(folder) not in {os.path.realpath(other) for other in others}


def is_trusted(path: Path, text: str) -> bool:
    """Whether the user trusts ``path`` with the content ``text``."""
    return read_trusted().get(_key(path)) == _hash(text)


def refusal_of_file(kind: str, path: Path) -> ConfigError:
    """Why an untrusted file, of which everything acts, cannot be used; ``kind``: what it is."""
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
        hint=f"read it, then `hpcjobs sites trust {path}`; submit --dry-run prints the script without trust",
    )


def trust_file(path: Path, text: str) -> None:
    """Trust the file ``path`` with the content ``text``.

    Raises:
        ConfigError: that cannot be recorded.
    """
    with _record_of_trust() as hashes:
        hashes[_key(path)] = _hash(text)


def forget_file(path: Path) -> bool:
    """Trust the file no longer; whether it was trusted.

    Raises:
        ConfigError: that cannot be recorded.
    """
    with _record_of_trust() as hashes:
        return hashes.pop(_key(path), None) is not None


def read_trusted() -> dict[str, str]:
    """SHA-256 of the content of each trusted file, by its path.

    Raises:
        ConfigError: the record cannot be read.
    """
    try:
        return msgspec.json.decode(_record().read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{_record()}: the record of trusted site files cannot be read: {reason_of(error)}",
            hint="remove it, and trust the files anew",
        ) from error


@contextmanager
def _record_of_trust() -> Iterator[dict[str, str]]:
    """What `read_trusted` gives, to be changed: one command at a time, and written at the end."""
    try:
        _record().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(_record().with_suffix(".lock"), "a") as lock:
            if not lock_file(lock.fileno()):
                warn_without_locks(_record().parent, "trust files twice")
            hashes = read_trusted()
            yield hashes
            write_beside(_record(), msgspec.json.encode(hashes))
    except OSError as error:
        raise ConfigError(f"{_record()}: cannot be written: {reason_of(error)}") from error


def _record() -> Path:
    return state_dir() / "trusted_sites.json"


def _key(path: Path) -> str:
    return os.path.realpath(path)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
