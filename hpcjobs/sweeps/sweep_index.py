"""The index of sweeps: one small file per sweep in the user's state folder, as for jobs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from hpcjobs.errors import UnknownJobError, nearest
from hpcjobs.files import file_name, state_dir, write_beside
from hpcjobs.run.job_files import read_json
from hpcjobs.site.models import Frozen
from hpcjobs.sweeps.folder import SweepFolder


class KnownSweep(Frozen, frozen=True):
    """A sweep's name and folder."""

    name: str
    path: str


def folder_name(name: str) -> str:
    """The folder of the sweep called ``name``, below the site's run_root."""
    return f"sweep-{name}"


def _index() -> Path:
    return state_dir() / "sweeps"


def remember(name: str, folder: SweepFolder) -> None:
    """Let ``hpcjobs sweep status NAME`` find the sweep."""
    _index().mkdir(parents=True, exist_ok=True, mode=0o700)
    tag = hashlib.sha256(str(folder.path).encode()).hexdigest()[:8]
    known = KnownSweep(name=name, path=str(folder.path))
    write_beside(_index() / f"{file_name(name)}.{tag}.json", msgspec.json.encode(known))


def find_folder(name: str) -> SweepFolder:
    """The sweep of that name (one below the current folder first, then the newest), or in that folder.

    Raises:
        UnknownJobError: there is none.
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
    """The sweep's folder; foreign if there is a sweep in it that is none of the user's."""
    return SweepFolder(path, foreign=os.path.lexists(path / "sweep.json") and not _is_own(path))


def _is_own(path: Path) -> bool:
    """Whether the user has submitted the sweep in this folder, or this is a job of that sweep."""
    folder = os.path.realpath(path)
    if f"{os.path.realpath(os.environ.get('HPCJOBS_RUN_DIR', '/'))}/".startswith(f"{folder}/"):
        return True
    return any(os.path.realpath(sweep.path) == folder for sweep in list_sweeps())


def list_sweeps() -> list[KnownSweep]:
    """Every sweep, the newest first."""
    if not _index().is_dir():
        return []
    files = sorted(_index().glob("[!.]*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [known for path in files if (known := read_json(path, KnownSweep)) is not None]
