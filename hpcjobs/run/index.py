"""Which jobs there are: one small file per job in the user's state folder.

One file per job, written beside and renamed, is all the locking this needs: concurrent submits never
touch the same file, on NFS too, and a shared home makes a job known on every login node.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from hpcjobs.errors import HpcJobsError
from hpcjobs.files import write_beside
from hpcjobs.site.models import Frozen


class Entry(Frozen, frozen=True):
    """A submitted job: how to find it again and whom to ask about it."""

    job_id: str
    name: str
    site: str
    scheduler: str
    run_dir: str
    submitted: float
    """Seconds since 1970."""
    cluster: str | None = None
    slurm_conf: str | None = None
    array: str | None = None
    """The array specification; None: a plain job."""
    task: int | None = None
    """Only this task of the array is meant; never set in the index itself."""


def index_dir() -> Path:
    """``$XDG_STATE_HOME/hpcjobs/jobs``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hpcjobs" / "jobs"


def add(entry: Entry) -> None:
    """Remember ``entry``; a job id that a new cluster hands out again takes the old one's place."""
    folder = index_dir()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_beside(folder / f"{entry.site}.{entry.job_id}.json", msgspec.json.encode(entry))


def entries(*, since: float = 0.0) -> list[Entry]:
    """Jobs submitted at or after ``since`` (seconds since 1970), oldest first."""
    folder = index_dir()
    if not folder.is_dir():
        return []
    found = []
    with os.scandir(folder) as files:
        for file in files:
            if file.name.startswith(".") or file.stat().st_mtime < since:
                continue
            found.append(_read(Path(file.path)))
    return sorted((entry for entry in found if entry.submitted >= since), key=lambda entry: entry.submitted)


def _read(path: Path) -> Entry:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Entry)
    except msgspec.MsgspecError as error:
        hint = "remove the file to forget the job"
        raise HpcJobsError(f"{path}: damaged record of a job: {error}", hint=hint) from error
