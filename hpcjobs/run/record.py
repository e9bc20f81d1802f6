"""Records submitted jobs: in their run folders, and in the index.

Before a job is handed over, a file in the state folder names its run folder; it is removed when the job is recorded.
So every command finds a job whose submitter was killed in between (`adopt`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
import warnings
from pathlib import Path

import msgspec

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import write_beside
from hpcjobs.job.models import Plan
from hpcjobs.processes.tree import start_ticks
from hpcjobs.record.names import SUBMITTED
from hpcjobs.run import index
from hpcjobs.run.identity import own_cluster, user_name
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import Submitted


class Submitter(msgspec.Struct, frozen=True, kw_only=True):
    """The process that submits, or did."""

    host: str
    pid: int
    started: int | None
    """Ticks from boot to the process's start."""
    when: float

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_under_way(self) -> bool:
        """Whether the process still runs on this host."""
        return self.is_here and self.started is not None and start_ticks(self.pid) == self.started


def this_process() -> Submitter:
    """The process that calls this."""
    pid = os.getpid()
    return Submitter(host=socket.gethostname(), pid=pid, started=start_ticks(pid), when=time.time())


class Begun(Submitter, frozen=True, kw_only=True):
    """A submission that is not recorded yet: its run folder may have a job."""

    run_dir: str
    scheduler: str
    slurm_conf: str | None = None
    cluster: str | None = None
    """As in `Entry`."""


def begin(plan: Plan) -> None:
    """Note that the plan's job is being handed over. Where the state folder cannot be written, `remember` says so."""
    job = plan.job
    begun = Begun(
        run_dir=str(plan.run_dir), scheduler=job.scheduler, slurm_conf=job.slurm_conf,
        cluster=own_cluster(job.scheduler, job.slurm_conf), **msgspec.structs.asdict(this_process()),
    )  # fmt: skip
    path = _begun_path(plan.run_dir)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_beside(path, msgspec.json.encode(begun))


def began_at(run_dir: str | Path) -> float | None:
    """When the job of the run folder was handed over, if that is not recorded yet; seconds since 1970."""
    begun = _read_begun(_begun_path(run_dir))
    return None if begun is None else begun.when


def forget(run_dir: str | Path) -> None:
    """Note that the run folder has no job, or one that is recorded."""
    with contextlib.suppress(OSError):  # the next command looks at it again
        _begun_path(run_dir).unlink()


def read_begun() -> list[Begun]:
    """Submissions that are under way, or were cut short."""
    try:
        names = os.listdir(_begun_dir())
    except OSError:
        return []
    return [begun for name in names if name.endswith(".json") and (begun := _read_begun(_begun_dir() / name))]


def _read_begun(path: Path) -> Begun | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Begun)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # it was removed just now, or lost its content
        return None


def _begun_dir() -> Path:
    return index.index_dir() / "begun"


def _begun_path(run_dir: str | Path) -> Path:
    return _begun_dir() / f"{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:32]}.json"


def remember(plan: Plan, taken: Submitted, *, submitted: float | None = None) -> Entry:
    """Record that the scheduler has accepted the job: in its run folder, then in the index.

    ``submitted`` is when that was, if not just now.

    The job runs whether that can be written or not: what cannot is a warning, and either record is enough. What the
    scheduler printed for the user is a warning too.
    """
    job = plan.job
    for message in taken.messages:
        warnings.warn(message, HpcJobsWarning, stacklevel=2)
    entry = Entry(
        job_id=taken.job_id,
        name=job.name,
        site=job.site,
        scheduler=job.scheduler,
        run_dir=str(plan.run_dir),
        submitted=time.time() if submitted is None else submitted,
        cluster=taken.cluster or own_cluster(job.scheduler, job.slurm_conf),
        slurm_conf=job.slurm_conf,
        array=job.resources.array or None,
        user=user_name(),
    )
    try:
        write_beside(plan.run_dir / SUBMITTED, msgspec.json.encode(entry))
    except OSError as error:
        _warn(entry, f"in its run folder {plan.run_dir}", error)
    try:
        index.add(entry)
        forget(plan.run_dir)
    except OSError as error:
        _warn(entry, f"in the list of jobs {index.index_dir()}; name it by its run folder {plan.run_dir}", error)
    return entry


def _warn(entry: Entry, where: str, error: OSError) -> None:
    reason = error.strerror or str(error)
    warnings.warn(
        f"job {entry.job_id} was accepted, but could not be recorded {where}: {reason}", HpcJobsWarning, stacklevel=3
    )
