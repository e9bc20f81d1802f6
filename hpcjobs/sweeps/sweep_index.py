"""The index of sweeps: a store with a line per sweep, as for jobs."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import msgspec

from hpcjobs.errors import HpcJobsWarning, UnknownJobError, nearest
from hpcjobs.files import AppendStore, StoredLine
from hpcjobs.site.models import Frozen
from hpcjobs.sweeps.folder import SweepFolder


class KnownSweep(Frozen, frozen=True):
    """A submitted sweep."""

    name: str
    path: str
    time: float
    """When it was submitted last, in seconds since 1970."""


def folder_name(name: str) -> str:
    """The folder of the sweep called ``name``, below the site's run_root."""
    return f"sweep-{name}"


def _store() -> AppendStore:
    return AppendStore("sweeps")


def remember(name: str, folder: SweepFolder) -> None:
    """Let ``hpcjobs sweep status NAME`` find the sweep."""
    known = KnownSweep(name=name, path=str(folder.path), time=time.time())
    _store().append([msgspec.json.encode(known).decode()])


def find_folder(name: str) -> SweepFolder:
    """The sweep of that name (one below the current folder first, then the newest), or in that folder.

    Raises:
        UnknownJobError: no sweep has this name.
    """
    if "/" in name or os.path.isfile(os.path.join(name, "sweep.json")):
        return open_folder(Path(name).absolute())
    known = [sweep for sweep in list_sweeps() if Path(sweep.path).is_dir()]
    named = [Path(sweep.path) for sweep in known if sweep.name == name]
    if not named:
        hint = nearest(name, {sweep.name for sweep in known}) if known else "no sweep was submitted yet"
        raise UnknownJobError(f"no sweep named {name!r}", hint=hint)
    here = [path for path in named if path.is_relative_to(Path.cwd())]
    return SweepFolder((here or named)[0])


def open_folder(path: Path) -> SweepFolder:
    """The sweep's folder; foreign if it has a sweep that the user has not submitted."""
    return SweepFolder(path, foreign=os.path.lexists(path / "sweep.json") and not _is_own(path))


def _is_own(path: Path) -> bool:
    """Whether the user has submitted the sweep in this folder, or this is a job of that sweep."""
    folder = os.path.realpath(path)
    if f"{os.path.realpath(os.environ.get('HPCJOBS_RUN_DIR', '/'))}/".startswith(f"{folder}/"):
        return True
    return any(os.path.realpath(sweep.path) == folder for sweep in list_sweeps())


def list_sweeps() -> list[KnownSweep]:
    """Every sweep, the newest first; a line or log that cannot be used is skipped, with a warning that names it."""
    known: dict[str, KnownSweep] = {}
    for line in _store().read(lambda error: _warn(error.filename, error.strerror)):
        if (sweep := _decode(line)) is not None:
            known[sweep.path] = sweep
    return sorted(known.values(), key=lambda sweep: sweep.time, reverse=True)


def _decode(line: StoredLine) -> KnownSweep | None:
    try:
        return msgspec.json.decode(line.text, type=KnownSweep)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        _warn(line, error)
        return None


def _warn(place: object, reason: object) -> None:
    warnings.warn(f"{place} cannot be used: {reason}", HpcJobsWarning, stacklevel=3)
