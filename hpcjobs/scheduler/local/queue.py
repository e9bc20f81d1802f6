"""The queue of this machine: every decision about which job runs, made under one lock by whichever process needs it.

The queue needs no daemon. Supervisors, and commands that list or cancel jobs, each read the folders, mark jobs of
killed supervisors as failed, and wake jobs that can start. Jobs start in the order of submission, as CPUs and GPUs
allow; NVIDIA's GPUs are counted by device files, AMD's by the topology of their driver.

Each job has a folder, named by its id:

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
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, TypeVar

from hpcjobs.files import FULL, write_beside
from hpcjobs.processes import tree
from hpcjobs.processes.tree import MARK, Leader

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


CHOICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables with which a user or an enclosing job selects devices; HIP reads both as the same list."""
_ROCR = "ROCR_VISIBLE_DEVICES"
_SIMD_COUNT = re.compile(r"^simd_count ([1-9]\d*)$", re.MULTILINE | re.ASCII)


def visible_gpus(environ: Mapping[str, str], *, count: int | None, root: Path = Path("/")) -> tuple[str, ...]:
    """The names of the GPUs to share out, in the form of CUDA_VISIBLE_DEVICES.

    A user's selection (`CHOICES`) limits and orders them; an enclosing local job's selection is ignored.

    Args:
        count: number of GPUs, numbered from 0, without a look at the machine; None: the machine's GPUs.
    """
    names = list_gpus(environ, root) if count is None else tuple(map(str, range(count)))
    choice = user_choice(environ)
    if choice is None or environ.get(MARK):
        return names
    listed = map(str.strip, choice.partition("=")[2].split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: _names_gpu(name, names), listed)))


def user_choice(environ: Mapping[str, str]) -> str | None:
    """The first variable of `CHOICES` that is set, as `NAME=VALUE`."""
    return next((f"{name}={environ[name]}" for name in CHOICES if name in environ), None)


def list_gpus(environ: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """Numbers of NVIDIA devices, or of AMD devices, which ROCR_VISIBLE_DEVICES renumbers.

    CUDA numbers the devices that are there from 0: the number in a device file's name is another one.
    """
    nvidia = sum(1 for path in root.glob("dev/nvidia[0-9]*") if path.name[6:].isdigit())
    if nvidia:
        return tuple(map(str, range(nvidia)))
    amd = count_amd_gpus(root)
    if environ.get(_ROCR):
        amd = min(amd, len(environ[_ROCR].split(",")))
    return tuple(map(str, range(amd)))


def count_amd_gpus(root: Path) -> int:
    """Nodes of the driver's topology with SIMD units: those without are CPUs. Both dies of an MI250X count."""
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(1 for path in nodes if _SIMD_COUNT.search(path.read_text(encoding="ascii")))


def _names_gpu(name: str, names: tuple[str, ...]) -> bool:
    """As CUDA reads the list: by index or UUID, and the first name that is neither ends it."""
    return name in names or (bool(names) and name.startswith(("GPU-", "MIG-")))


def assign_gpus(gpus: tuple[str, ...]) -> dict[str, str]:
    """The variables that show a job these GPUs alone; AMD's HIP refuses the two to differ."""
    value = ",".join(gpus)
    return dict.fromkeys(CHOICES if "HIP_VISIBLE_DEVICES" in os.environ else CHOICES[:1], value)


class QueuedJob(NamedTuple):
    """A job that has not ended: waiting, running, or an array with tasks still to start."""

    job: LocalJob
    request: Request
    started: Started | None = None
    waiting: tuple[int, ...] | None = None
    """Indices of an array that have not started. None: no array."""

    @property
    def done_starting(self) -> bool:
        return self.started is not None or self.waiting == ()


class Start(NamedTuple):
    """It may start, with these GPUs; of an array: its first waiting task."""

    gpus: tuple[str, ...]


class Wait(NamedTuple):
    """It must wait, for this reason (in Slurm's words), until one of ``watch`` changes."""

    reason: str
    watch: tuple[LocalJob, ...]


class Never(NamedTuple):
    """It never will."""

    reason: str


StartDecision = Start | Wait | Never
Outcome = Callable[[str], str | None]
"""Final state of a job by its id; None: it has not ended."""


class _Machine:
    """CPUs and GPUs in use, while the jobs of the queue are considered one after the other."""

    def __init__(self, running: Iterable[QueuedJob]) -> None:
        self.cpus = 0
        self.gpus: set[str] = set()
        for entry in running:
            if entry.started is not None:
                self.take(entry.request, entry.started.gpus)

    def take(self, request: Request, gpus: Iterable[str]) -> None:
        self.cpus += _slots(request)
        self.gpus.update(gpus)

    def fit(self, request: Request) -> tuple[str, ...] | None:
        """The GPUs it would get; None: it does not fit."""
        names = request.gpu_names if request.gpu_names is not None else map(str, range(request.machine_gpus))
        free = [name for name in names if name not in self.gpus]
        if self.cpus + _slots(request) > request.machine_cpus or len(free) < request.gpus:
            return None
        return tuple(free[: request.gpus])


def _slots(request: Request) -> int:
    """CPUs accounted for: one that asks for more than there are has the machine to itself."""
    return min(request.cpus, request.machine_cpus)


def decide(entries: Iterable[QueuedJob], outcome: Outcome) -> dict[str, StartDecision]:
    """A verdict for every waiting entry, by job id; ``entries`` are in the order of submission.

    Strictly in order: a job that does not fit holds back all behind it, so that a large one is not
    starved by small ones. Jobs that wait for other jobs, or for their own array's limit, hold back no other job.
    """
    entries = list(entries)
    machine = _Machine(entries)
    verdicts: dict[str, StartDecision] = {}
    first: LocalJob | None = None  # the job nearest before that is held back by resources or order
    between: list[LocalJob] = []  # those after it that wait for other jobs: one may be held back before this job is
    for entry in entries:
        if entry.done_starting:
            continue
        verdict = _own_verdict(entry, entries, outcome)
        if verdict is None and first is not None:
            verdict = Wait("Priority", (first, *between))
        elif verdict is None:
            gpus = machine.fit(entry.request)
            starting = {name for name, other in verdicts.items() if isinstance(other, Start)}
            busy = tuple(e.job for e in entries if e.started is not None or e.job.job_id in starting)
            verdict = Wait("Resources", (*busy, *between)) if gpus is None else Start(gpus)
        if isinstance(verdict, Start):
            held_back = not _take_turn(entry, verdict.gpus, machine, entries)
        else:
            held_back = isinstance(verdict, Wait) and verdict.reason in ("Resources", "Priority")
        if held_back:
            first, between = entry.job, []
        elif isinstance(verdict, Wait):
            between.append(entry.job)
        verdicts[entry.job.job_id] = verdict
    return verdicts


def _take_turn(entry: QueuedJob, gpus: tuple[str, ...], machine: _Machine, entries: Iterable[QueuedJob]) -> bool:
    """Give an entry its slots, an array one for each task it may run; False: a task finds none left."""
    machine.take(entry.request, gpus)
    tasks = len(entry.waiting or (0,))
    if entry.request.throttle is not None:
        tasks = min(tasks, entry.request.throttle - len(_running_tasks(entry, entries)))
    for _ in range(tasks - 1):
        more = machine.fit(entry.request)
        if more is None:
            return False
        machine.take(entry.request, more)
    return True


def _running_tasks(entry: QueuedJob, entries: Iterable[QueuedJob]) -> tuple[LocalJob, ...]:
    return tuple(e.job for e in entries if e.started is not None and e.job.submitted_job == entry.job)


def _own_verdict(entry: QueuedJob, entries: Iterable[QueuedJob], outcome: Outcome) -> StartDecision | None:
    """The verdict of the job's own conditions; None: only slots and order matter."""
    pending = []
    for kind, job_id in entry.request.dependency:
        state = outcome(job_id)
        if state is None:
            pending.append(entry.job._replace(job_id=job_id).submitted_job)
        elif not _MET[kind](state):
            return Never("DependencyNeverSatisfied")
    if pending:
        return Wait("Dependency", tuple(pending))
    own = _running_tasks(entry, entries)
    if entry.request.throttle is not None and len(own) >= entry.request.throttle:
        return Wait("JobArrayTaskLimit", own)
    return None


_MET: Mapping[str, Callable[[str], bool]] = {
    "afterok": lambda state: state == "COMPLETED",
    "afterany": lambda state: True,
    "afternotok": lambda state: state != "COMPLETED",
}
DEPENDENCY_KINDS = tuple(_MET)


KILLED = "supervisor was killed"
CANCELLED = "cancelled"


class QueueView(NamedTuple):
    """The queue at one moment, in the order of submission."""

    entries: tuple[QueuedJob, ...]
    verdicts: dict[str, StartDecision]
    unrecorded: Mapping[str, Ended] = MappingProxyType({})
    """Ends of jobs with a killed supervisor, while the disk has no room for their record."""


class Claim(NamedTuple):
    """A job, or a task of an array, that has its slots and is to be run by the claimer."""

    job: LocalJob
    started: Started
    alive: int | None
    """The handle that holds the lock of a task; None for the claimer's job, which is locked already."""


def update(root: str, *, me: LocalJob | None = None) -> QueueView:
    """Read the queue, mark jobs of dead supervisors as failed, and wake all jobs except ``me`` that can start.

    The next in turn is woken, too: what it must watch has changed. The caller holds the lock.
    """
    unrecorded: dict[str, Ended] = {}
    entries = tuple(_scan(root, unrecorded))
    verdicts = decide(entries, lambda job_id: outcome(LocalJob(root, job_id)))
    for job_id, verdict in verdicts.items():
        job = LocalJob(root, job_id)
        is_next = isinstance(verdict, Wait) and verdict.reason == "Resources"
        if job != me and (is_next or isinstance(verdict, (Start, Never))):
            wake(job)
    return QueueView(entries, verdicts, unrecorded)


def _scan(root: str, unrecorded: dict[str, Ended]) -> Iterator[QueuedJob]:
    active = (LocalJob(root, name) for name in os.listdir(os.path.join(root, "active")))
    for job in sorted(active, key=lambda job: (job.number, -1 if job.element is None else job.element)):
        request = job.read_request()
        if job.read_ended() is not None or request is None:
            os.unlink(job.marker)
        elif not is_alive(job):
            ended = end_abandoned(job, grace_s=0)  # no grace: everybody who decides waits for this lock
            try:
                record(job, ended)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                unrecorded[job.job_id] = ended
        else:
            waiting = _waiting(job, request.array) if job.element is None and request.array is not None else None
            yield QueuedJob(job, request, job.read_started(), waiting)


def _waiting(job: LocalJob, array: tuple[int, ...]) -> tuple[int, ...]:
    if job.cancelled:
        return ()
    known = {task.element for task in job.tasks()}
    return tuple(index for index in array if index not in known)


def end_abandoned(job: LocalJob, *, grace_s: float) -> Ended:
    """End the processes of a killed supervisor. Tasks of an array have supervisors of their own."""
    started = job.read_started()
    leader = started.leader if started is not None else None
    tree.end(lambda: tree.members(job.folder, leader), grace_s=grace_s)
    return Ended("FAILED", time.time(), reason=KILLED)


def record(job: LocalJob, ended: Ended) -> None:
    """Record the end of a job; from then on it holds no slot. The caller holds the lock."""
    job.write(ended)  # before the marker goes: without both, a task counts as never run
    if os.path.exists(job.marker):
        os.unlink(job.marker)


def finish(job: LocalJob, ended: Ended) -> None:
    """Record the end of a job, and wake jobs that can start now."""
    with Lock(job.root):
        record(job, ended)
        update(job.root, me=job)


def claim(job: LocalJob) -> Claim | Wait | Never | None:
    """Start ``job``, or the next task of an array, if it can start now. None: no task waits any more."""
    with Lock(job.root):
        view = update(job.root, me=job)
        verdict = view.verdicts.get(job.job_id)
        if not isinstance(verdict, Start):
            return verdict
        entry = next(entry for entry in view.entries if entry.job == job)
        started = Started(time.time(), verdict.gpus)
        if entry.waiting is None:
            job.write(started)
            return Claim(job, started, None)
        task = job.task(entry.waiting[0])
        try:
            os.mkdir(task.folder, 0o700)
            # Locked and written before it counts: the next reader ends what has no supervisor.
            alive = make(task)
            task.write(started)
            activate(task)
        except OSError:
            shutil.rmtree(task.folder, ignore_errors=True)  # a task with a folder has started
            raise
        return Claim(task, started, alive)


def outcome(job: LocalJob) -> str | None:
    """Final state; None: not ended. An array has ended when all its tasks have, and completed if all did."""
    request = job.read_request()
    if request is None:
        return "UNKNOWN"
    submission_end = job.submitted_job.read_ended()
    if request.array is None or job.element is not None:
        # A task with a folder and no marker: the supervisor of its array was killed before it could run.
        ended = job.read_ended() or (None if os.path.exists(job.marker) else submission_end)
        return None if ended is None else ended.state
    if submission_end is None:
        return None
    states = [outcome(job.task(index)) for index in request.array]
    if None in states:
        return None
    return next((state for state in states if state != "COMPLETED"), "COMPLETED")


def cancel(job: LocalJob) -> None:
    """End a job, an array or one task. Waiting ones end at once, running ones by their supervisor."""
    with Lock(job.root):
        request = job.read_request()
        if request is None or outcome(job) is not None:
            return
        if job.element is not None and not os.path.isdir(job.folder):
            os.mkdir(job.folder, 0o700)
        started = job.read_started() is not None
        running = [task for task in job.tasks() if task.read_ended() is None] if job.element is None else []
        os.close(os.open(job.path("cancel"), os.O_WRONLY | os.O_CREAT, 0o600))
        if not started and not running:
            record(job, Ended("CANCELLED", time.time(), reason=CANCELLED))
        for one in (job, job.submitted_job, *running):
            wake(one)
        update(job.root)
