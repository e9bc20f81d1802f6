"""Records submitted jobs, finds unrecorded ones of killed submitters, and recognises repeated submissions of a laptop.

Before a job is handed over, a file in the state folder names its run folder; it is removed when the job is recorded.
So every command finds the job if the submitter was killed in between.

A laptop sends a token in HPCJOBS_SUBMISSION. The token is a file in the state folder, written before the job is handed
over, and leads to the job of the first time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread

import msgspec

from hpcjobs.errors import HpcJobsWarning, RequestError, SchedulerDownError, SchedulerError, reason_of
from hpcjobs.files import lock_file, make_folder, read_regular, state_dir, user_name, write_beside
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.tree import start_ticks
from hpcjobs.record import JOB_SCRIPT
from hpcjobs.record.manifest import read_manifest
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import read_submitted, write_submitted
from hpcjobs.run.status import is_cluster_reachable, own_cluster
from hpcjobs.scheduler.base import JobQueue, Submitted, connect


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
    pid = os.getpid()
    return Submitter(host=socket.gethostname(), pid=pid, started=start_ticks(pid), when=time.time())


class Begun(Submitter, frozen=True, kw_only=True):
    """A submission that is not recorded yet: its run folder may have a job."""

    run_dir: str
    scheduler: str
    slurm_conf: str | None = None
    cluster: str | None = None
    """As in `Entry`."""


def begin(plan: Plan) -> Begun:
    """Record that the plan's job is being handed over.

    If the state folder cannot be written, `remember` warns, or `keep_begun` if it is not known whether there is a job.
    """
    job = plan.job
    begun = Begun(
        run_dir=str(plan.run_dir), scheduler=job.scheduler, slurm_conf=job.slurm_conf,
        cluster=own_cluster(job.scheduler, job.slurm_conf), **msgspec.structs.asdict(this_process()),
    )  # fmt: skip
    with contextlib.suppress(OSError):
        _write_begun(begun)
    return begun


def keep_begun(begun: Begun) -> None:
    """Record a submission that may have led to a job, if `begin` could not; a failed write is a warning."""
    if _read_begun(_begun_path(begun.run_dir)) is not None:
        return
    try:
        _write_begun(begun)
    except OSError as error:
        warnings.warn(
            f"if a job was accepted, it is not in the list of jobs {index.index_dir()}, which cannot be written: "
            f"{error.strerror or error}; its run folder is {begun.run_dir}",
            HpcJobsWarning,
            stacklevel=2,
        )


def _write_begun(begun: Begun) -> None:
    path = _begun_path(begun.run_dir)
    make_folder(path.parent)
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

    The job runs in any case, so a failed write is a warning, and either record is enough. Messages of the scheduler are
    warnings too.
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
    # The mark of `begin` goes last: after a kill in between the next command finds it, and records the job.
    try:
        write_submitted(plan.run_dir, entry)
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


UNDECIDED_S = 600.0
"""How long a submission that was cut short, or that another host began, may still lead to a job: an sbatch outlives
the process that started it."""


def plan_in(run_dir: Path) -> Plan:
    """Read the plan of a run folder. Raises RequestError: its files cannot be used."""
    try:
        manifest = read_manifest(run_dir)
        job = msgspec.convert(manifest.job, Job)
        script = read_regular(run_dir / JOB_SCRIPT).decode()
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise RequestError(f"{run_dir} is no run folder that can be used: {reason_of(error)}") from error
    return Plan(job, script, run_dir, tuple(manifest.command), manifest.command_line or "")


def adopt_job(run_dir: Path, scheduler: JobQueue) -> Entry | None:
    """Find the job of this folder's script, and record it if necessary; None: no such job.

    Raises SchedulerError: it does not answer, so there may be one.
    """
    entry = read_submitted(run_dir)
    # A record that was copied from another run folder is about the job of that one.
    if entry is not None and os.path.realpath(entry.run_dir) == os.path.realpath(run_dir):
        with suppress(OSError):  # the next command tries again
            if all((known.run_dir, known.job_id) != (entry.run_dir, entry.job_id) for known in index.entries()):
                index.add(entry)
            forget(run_dir)
        return entry
    if not (run_dir / JOB_SCRIPT).exists():  # the script is written last: not submitted yet
        return None
    taken = scheduler.find_submitted(plan := plan_in(run_dir))
    if not taken:
        return None
    when = began_at(run_dir)
    if when is None:  # the list may have the job, if only the record in its folder could not be written
        when = next((e.submitted for e in reversed(index.entries()) if _is_job_of(e, run_dir, taken[0])), None)
    return remember(plan, taken[0], submitted=when)


def _is_job_of(entry: Entry, run_dir: Path, taken: Submitted) -> bool:
    return entry.job_id == taken.job_id and os.path.realpath(entry.run_dir) == os.path.realpath(run_dir)


def read_index() -> index.Index:
    """Read the index, after recording jobs of killed submitters."""
    begun = [each for each in read_begun() if not each.is_under_way]
    for each in begun:
        with suppress(SchedulerError, RequestError):  # it is not known yet: the next command asks again
            _adopt(each)
    return index.read()


def _adopt(begun: Begun) -> None:
    """Record the job of a submission that was cut short; forget one that surely led to no job."""
    run_dir = Path(begun.run_dir)
    # Not mounted here, or another cluster's: only who reaches both can say that there is no job.
    if not run_dir.parent.is_dir() or not is_cluster_reachable(begun.scheduler, begun.slurm_conf, begun.cluster):
        return
    entry = adopt_job(run_dir, connect(begun.scheduler, begun.slurm_conf)) if run_dir.is_dir() else None
    if entry is None and time.time() - begun.when > UNDECIDED_S:
        forget(run_dir)


VARIABLE = "HPCJOBS_SUBMISSION"
_REMEMBERED_S = 30 * 24 * 3600.0
_LOOK_S = 0.2


class _Claim(Submitter, frozen=True, kw_only=True):
    """Who submits with a token, or did."""

    run_dir: str
    finished: bool = False
    """Whether a sweep was handed over completely."""


class Submission:
    """One submission with a token."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find_or_begin(self, scheduler: JobQueue, run_dir: Path) -> Entry | None:
        """The job with this token; without one, record that the job of ``run_dir`` is being submitted.

        Of processes that repeat a command at the same time, one submits: the scheduler may need half a minute to say
        that there is no job. Raises SchedulerDownError: as `find_job`. OSError: the state folder cannot be written.
        """
        make_folder(self._path.parent)
        while True:
            self._await_claim()  # without the lock, which another host may wait for
            descriptor = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                lock_file(descriptor)
                if (claim := self._read()) is not None and claim.is_under_way:
                    continue
                entry = self.find_job(scheduler)
                if entry is None:
                    self.begin(run_dir)  # before the job is handed over: a repeated command then asks about this folder
                return entry
            finally:
                os.close(descriptor)

    def find_job(self, scheduler: JobQueue) -> Entry | None:
        """The job with this token, awaited while it is being submitted; None: no such job.

        Raises SchedulerDownError: another login host began it just now, and it is not known how that ended.
        """
        claim = self._await_claim()
        if claim is None:
            return None
        entry = adopt_job(Path(claim.run_dir), scheduler)
        if entry is None:
            _refuse_if_elsewhere(claim)
        return entry

    def find_end(self) -> float | None:
        """When the sweep with this token was handed over completely; None: it was not.

        Raises SchedulerDownError: as `find_job`.
        """
        claim = self._await_claim()
        if claim is None or claim.finished:
            return None if claim is None else claim.when
        _refuse_if_elsewhere(claim)
        return None

    def _await_claim(self) -> _Claim | None:
        """The claim, once no process of this host submits with this token."""
        while (claim := self._read()) is not None and not claim.finished and claim.is_under_way:
            text = f"process {claim.pid} of this host is submitting this already: waiting for it"
            warnings.warn(text, HpcJobsWarning, stacklevel=3)  # printed once
            time.sleep(_LOOK_S)
        return claim

    def begin(self, run_dir: Path) -> None:
        """Record that the job or sweep of ``run_dir`` is being submitted."""
        self._write(run_dir, finished=False)

    def finish(self, run_dir: Path) -> None:
        """Record that all of the sweep in ``run_dir`` is handed over."""
        self._write(run_dir, finished=True)

    def _write(self, run_dir: Path, *, finished: bool) -> None:
        claim = _Claim(run_dir=str(run_dir), finished=finished, **msgspec.structs.asdict(this_process()))
        make_folder(self._path.parent)
        for path in (*self._path.parent.glob("*.json"), *self._path.parent.glob("*.lock")):
            with suppress(FileNotFoundError):  # another command removes them too
                if path.stat().st_mtime < time.time() - _REMEMBERED_S:
                    path.unlink()
        write_beside(self._path, msgspec.json.encode(claim))

    def forget(self) -> None:
        """Record that no job was submitted."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> _Claim | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Claim)
        except FileNotFoundError:
            return None


def _refuse_if_elsewhere(claim: _Claim) -> None:
    age_s = time.time() - claim.when
    if not claim.is_here and age_s < UNDECIDED_S:
        raise SchedulerDownError(
            f"login host {claim.host} began to submit this {age_s:.0f} s ago, and has not recorded a job",
            hint=f"try again: in {UNDECIDED_S - age_s:.0f} s it is submitted from here",
            maybe_taken=True,
        )


_numbers = itertools.count()


def next_submission() -> Submission | None:
    """The next submission of this command; None: it has no token."""
    token = os.environ.get(VARIABLE)
    if token is None:
        return None
    return Submission(state_dir() / "submissions" / f"{token}-{next(_numbers)}.json")


@contextmanager
def finish_without_terminal() -> Iterator[None]:
    """Within the block, a lost connection does not end this process before it has recorded the job."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
