"""The files of local jobs: one folder per job, named by its id.

<state>/hpcjobs/local/<host>/
    lock            held for every decision about who runs
    active/L7       one empty file per job, and per started task of an array, that has not ended
    jobs/L7/        request.json   the request, never changed
                    alive          locked as long as the job has a supervisor
                    wake           a FIFO: a byte in it makes the supervisor look again
                    cancel         there: the job is to be ended
                    started.json, ended.json, supervisor.log
    jobs/L7/3/      the same for task 3 of an array job, id L7_3, from its start on
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from types import TracebackType
from typing import NamedTuple, TypeVar

from hpcjobs.files import write_beside
from hpcjobs.processes.tree import Leader

Dependency = tuple[str, str]
"""How and whom: ``("afterok", "L3")``."""


class EarlySignal(NamedTuple):
    """A signal before the time limit (sbatch --signal)."""

    number: int
    before_s: float
    script_only: bool


class Request(NamedTuple):
    """A submitted job. ``cpus`` and ``gpus`` count for the job, or for one task of an array."""

    job_id: str
    name: str
    run_dir: str
    script: str
    cwd: str
    submitted: float
    cpus: int
    gpus: int
    machine_cpus: int
    machine_gpus: int
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""
    time_limit_s: float | None = None
    early_signal: EarlySignal | None = None
    dependency: tuple[Dependency, ...] = ()
    array: tuple[int, ...] | None = None
    throttle: int | None = None
    """Tasks of the array that may run at once."""
    gpu_names: tuple[str, ...] | None = None
    """The machine's GPUs in the form of CUDA_VISIBLE_DEVICES; None: numbered from 0."""


class Started(NamedTuple):
    """Written when the job gets its slots, and again when its script runs."""

    started: float
    gpus: tuple[str, ...] = ()
    """Names of the job's devices in the form of CUDA_VISIBLE_DEVICES."""
    leader: Leader | None = None


class Ended(NamedTuple):
    """How a job ended. Times in seconds since 1970; None: not known."""

    state: str
    ended: float
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    cpu_s: float | None = None
    max_rss_bytes: int | None = None
    """Peak memory of the largest process."""


Record = TypeVar("Record", Request, Started, Ended)


def plain(record: Request | Started | Ended) -> dict[str, object]:
    """As JSON has it."""
    values = record._asdict()
    early = values.get("early_signal")
    return values if early is None else {**values, "early_signal": early._asdict()}


def read(kind: type[Record], path: str) -> Record | None:
    """The record in the file ``path``. None: not there, or lost with the machine's power before it reached the disk."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return None
    if not text:
        return None
    values = json.loads(text)
    for name, value in values.items():
        if name == "early_signal" and value is not None:
            values[name] = EarlySignal(**value)
        elif isinstance(value, list):
            values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    if kind is Started:
        values["gpus"] = tuple(str(gpu) for gpu in values.get("gpus", ()))  # earlier versions wrote numbers
    return kind(**values)


class LocalJob(NamedTuple):
    """A job, or one task of an array job: where its files are."""

    root: str
    job_id: str

    @property
    def number(self) -> int:
        return int(self.job_id[1:].partition("_")[0])

    @property
    def element(self) -> int | None:
        """Task index within the array; None: a job, or a complete array."""
        index = self.job_id.partition("_")[2]
        return int(index) if index else None

    @property
    def submitted_job(self) -> LocalJob:
        """The array job this is a task of, or the job itself."""
        return self._replace(job_id=f"L{self.number}")

    def task(self, index: int) -> LocalJob:
        """Task ``index`` of this array job."""
        return self._replace(job_id=f"L{self.number}_{index}")

    @property
    def folder(self) -> str:
        parts = self.job_id.split("_")
        return os.path.join(self.root, "jobs", *parts)

    @property
    def marker(self) -> str:
        return os.path.join(self.root, "active", self.job_id)

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def read_request(self) -> Request | None:
        """None: no such job."""
        return read(Request, self.submitted_job.path("request.json"))

    def read_started(self) -> Started | None:
        return read(Started, self.path("started.json"))

    def read_ended(self) -> Ended | None:
        return read(Ended, self.path("ended.json"))

    @property
    def cancelled(self) -> bool:
        """Somebody wants it ended."""
        return os.path.exists(self.path("cancel")) or os.path.exists(self.submitted_job.path("cancel"))

    def tasks(self) -> list[LocalJob]:
        """The tasks of this array job that have a folder: started, or cancelled one by one."""
        names = sorted(int(name) for name in os.listdir(self.folder) if name.isdigit())
        return [self.task(index) for index in names]

    def write(self, record: Request | Started | Ended) -> None:
        """Replace a record atomically and durably."""
        name = f"{type(record).__name__.lower()}.json"
        write_beside(self.path(name), json.dumps(plain(record)))


def make(job: LocalJob) -> int:
    """Fill a new folder; the lock on ``alive``, which the caller holds through the handle returned.

    The lock belongs to the open file: whoever inherits the handle holds it on, and the kernel lets go
    of it when the last of them dies.
    """
    os.mkfifo(job.path("wake"), 0o600)
    handle = os.open(job.path("alive"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def activate(job: LocalJob) -> None:
    """From here on the job counts."""
    os.close(os.open(job.marker, os.O_WRONLY | os.O_CREAT, 0o600))


def is_alive(job: LocalJob) -> bool:
    """Whether the job has a supervisor."""
    try:
        handle = os.open(job.path("alive"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def wake(job: LocalJob) -> None:
    """Make the job's supervisor look again. One that has not opened its FIFO yet will look anyway."""
    try:
        handle = os.open(job.path("wake"), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return
        raise
    try:
        os.write(handle, b".")
    except (BlockingIOError, BrokenPipeError):
        return  # full of wake-ups, or the supervisor has just ended
    finally:
        os.close(handle)


class Lock:
    """Held while one decides who runs: ``with Lock(root): ...``."""

    def __init__(self, root: str) -> None:
        self._path = os.path.join(root, "lock")
        self._handle = -1

    def __enter__(self) -> None:
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
