"""The scheduler of one machine without Slurm: jobs run in the background and queue for CPUs and GPUs.

Each job has a supervisor process; see `hpcjobs.scheduler.local.supervisor` and `hpcjobs.scheduler.local.queue`.
Slots are counted per user and host: two users of one machine do not see each other's jobs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import hpcjobs
from hpcjobs.errors import RequestError, SchedulerError, UnknownJobError
from hpcjobs.files import make_folder, state_dir
from hpcjobs.guards import refuse_change
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.programs import Runner, clean_env
from hpcjobs.processes.start import start
from hpcjobs.processes.tree import MARK
from hpcjobs.scheduler.base import Estimate, JobRecord, State, Submitted
from hpcjobs.scheduler.local import queue
from hpcjobs.scheduler.local.queue import (
    DEPENDENCY_KINDS,
    Dependency,
    EarlySignal,
    Ended,
    LocalJob,
    Lock,
    Request,
    Wait,
)
from hpcjobs.site.resources import LocalEffect, fields_where
from hpcjobs.units import array_text, human_bytes, memory_bytes, task_ids

GRACE_S = 30.0
_MAX_TASKS = 10_000
_JOB_ID = re.compile(r"L([1-9]\d*)(?:_(?:0|[1-9]\d*))?\Z", re.ASCII)
_ARRAY_PART = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?\Z", re.ASCII)
_EARLY_SIGNAL = re.compile(r"(?P<script>B:)?(?P<signal>\w+)(?:@(?P<seconds>\d+))?\Z", re.ASCII)


def job_number(job_id: str) -> int | None:
    """``L7`` and ``L7_3`` -> 7; None: no id of a local job."""
    match = _JOB_ID.match(job_id)
    return int(match[1]) if match else None


def request_for(plan: Plan, known: Callable[[str], bool]) -> Request:
    """The request, still without id. ``known``: whether a job id exists.

    Raises RequestError: an option this scheduler cannot honour, more GPUs than there are, or no script.
    """
    job, resources = plan.job, plan.job.resources
    for field in fields_where("local", LocalEffect.REFUSED):
        if getattr(resources, field):
            raise RequestError(
                f"{field}={getattr(resources, field)} ({job.sources.get(field, 'default')}):"
                " jobs on this machine start as soon as its CPUs and GPUs allow, and nothing else is managed",
                hint="ask GPUs with gpus_per_node" if field == "gres" else f"leave {field} out for site {job.site}",
            )
    script = plan.run_dir / "job.sh"
    if not script.is_file():
        raise RequestError(f"no script to run at {script}")
    cpus, names = machine_cpus(), visible_gpus()
    _refuse_larger(job, cpus, names)
    array, throttle = _array(resources.array) if resources.array else (None, None)
    return Request(
        job_id="",
        name=job.name,
        run_dir=str(plan.run_dir),
        script=str(script),
        cwd=job.chdir,
        submitted=time.time(),
        cpus=cpus if resources.exclusive else job.ntasks_per_node * (resources.cpus_per_task or 1),
        gpus=job.gpus_per_node,
        machine_cpus=cpus,
        machine_gpus=len(names),
        gpu_names=names,
        grace_s=GRACE_S if (grace_s := _number("HPCJOBS_GRACE_S")) is None else float(grace_s),
        time_limit_s=job.time_limit_s,
        early_signal=_early_signal(resources.signal) if resources.signal else None,
        dependency=_dependency(resources.dependency, known) if resources.dependency else (),
        array=array,
        throttle=throttle,
    )


def _number(variable: str) -> int | None:
    """The whole number in an environment variable; None: it is not set.

    Raises RequestError: another value.
    """
    text = os.environ.get(variable)
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise RequestError(f"{variable}={text!r} (environment) is no integer", hint=f"unset {variable}")
    return int(text)


def machine_cpus() -> int:
    """CPUs to share out: HPCJOBS_LOCAL_CPUS, or those this process may run on."""
    cpus = _number("HPCJOBS_LOCAL_CPUS")
    return len(os.sched_getaffinity(0)) if cpus is None else cpus


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs to share out: HPCJOBS_LOCAL_GPUS, or the devices there are; a user's choice among them."""
    return queue.visible_gpus(os.environ, count=_number("HPCJOBS_LOCAL_GPUS"))


def _refuse_larger(job: Job, cpus: int, names: tuple[str, ...]) -> None:
    """Refuse resources that this machine lacks. More tasks than CPUs are allowed: they share them."""
    resources, memory = job.resources, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if job.gpus_per_node > len(names):
        choice = queue.user_choice(os.environ)
        why = "" if choice is None else f", chosen by {choice}"
        raise RequestError(f"{job.describe_option('gpus_per_node')}: this machine has {len(names)}{why}")
    if (resources.cpus_per_task or 1) > cpus:
        raise RequestError(f"{job.describe_option('cpus_per_task')}: this machine has {cpus}")
    per_cpu = job.ntasks_per_node * (resources.cpus_per_task or 1)
    for field, times in (("mem", 1), ("mem_per_cpu", per_cpu), ("mem_per_gpu", job.gpus_per_node)):
        value = getattr(resources, field)
        if value and memory_bytes(value) * times > memory:
            of_all = f" x {times}" if times > 1 else ""
            raise RequestError(f"{job.describe_option(field)}{of_all}: this machine has {human_bytes(memory)}")


def _array(text: str) -> tuple[tuple[int, ...], int | None]:
    """``0-3,7%2`` -> ((0, 1, 2, 3, 7), 2); ``0-15:4`` has a step."""
    body, percent, limit = text.partition("%")
    indices: set[int] = set()
    for part in body.split(","):
        match = _ARRAY_PART.match(part)
        if match is None or (percent and not (limit.isdigit() and int(limit))):
            raise RequestError(f"array={text!r} is not understood", hint="write 0-15, 1,3,5, 0-15:4 or 0-15%4")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (last - first) // int(match[3] or 1) + len(indices) >= _MAX_TASKS:
            raise RequestError(f"array={text!r}: the range is empty, or over {_MAX_TASKS} tasks")
        indices.update(range(first, last + 1, int(match[3] or 1)))
    return tuple(sorted(indices)), int(limit) if percent else None


def _dependency(text: str, known: Callable[[str], bool]) -> tuple[Dependency, ...]:
    """``afterok:L3:L4,afterany:L5`` -> pairs; all must be met."""
    dependencies: list[Dependency] = []
    for part in text.split(","):
        kind, *job_ids = part.split(":")
        if kind not in DEPENDENCY_KINDS or not job_ids:
            raise RequestError(
                f"dependency={text!r}: {part!r} is not understood on this machine",
                hint=f"write {', '.join(f'{kind}:L7' for kind in DEPENDENCY_KINDS)}; all joined by ',' must be met",
            )
        for job_id in job_ids:
            if job_number(job_id) is None or not known(job_id):
                raise RequestError(f"dependency={text!r}: there is no local job {job_id!r}")
            dependencies.append((kind, job_id))
    return tuple(dependencies)


def _early_signal(text: str) -> EarlySignal:
    """``USR1@120``, ``B:TERM@60``, ``10``: 60 s before the time limit unless a number of seconds is given."""
    match = _EARLY_SIGNAL.match(text)
    name = match["signal"].upper().removeprefix("SIG") if match else ""
    number = int(name) if name.isdigit() else getattr(signal, f"SIG{name}", None)
    if match is None or not isinstance(number, int) or number not in signal.valid_signals():
        raise RequestError(f"signal={text!r} is not understood", hint="write USR1@60 or B:USR1@60")
    return EarlySignal(int(number), float(match["seconds"] or 60), match["script"] is not None)


_INSTEAD = {
    "release": "they start as soon as their CPUs and GPUs are free",
    "requeue": "`hpcjobs rerun JOB` submits the job again",
    "update": "`hpcjobs cancel JOB`, then `hpcjobs rerun JOB` with other options",
}
"""Hints for verbs that this queue lacks."""
_PACKAGE_ROOT = Path(hpcjobs.__file__).resolve().parent.parent


def state_folder() -> Path:
    """The folder of this host's jobs, in ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    return state_dir() / "local" / os.uname().nodename


class LocalScheduler:
    """This machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self._root = str(folder or state_folder())

    def submit(self, plan: Plan) -> Submitted:
        """Queue the script in the plan's run folder, and return at once.

        Raises RequestError: an option this scheduler cannot honour, more GPUs than there are, or a dependency on a job
        that does not exist. SchedulerError: the supervisor did not start.
        """
        refuse_change("submit")
        request = request_for(plan, lambda job_id: self._known(job_id) is not None)
        (plan.run_dir / "logs").mkdir(mode=0o700, exist_ok=True)
        try:
            job = self._new_job()
        except OSError as error:
            raise SchedulerError(
                f"the queue of this machine cannot be written: {error.strerror}: {error.filename}",
                hint="XDG_STATE_HOME names another folder for it; is the disk full?",
            ) from error
        alive = queue.make(job)  # locked before it counts: a reader ends what has no supervisor
        try:
            job.write(request._replace(job_id=job.job_id))
            queue.activate(job)
            _start_supervisor(job, alive)
        finally:
            os.close(alive)
        return Submitted(job_id=job.job_id)

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        """The jobs that were given the script in the plan's run folder, ended or not, oldest first.

        A submission that was killed before `queue.activate` never runs, and is left out.
        """
        try:
            names = os.listdir(os.path.join(self._root, "jobs"))
        except FileNotFoundError:
            return []
        script = os.path.join(plan.run_dir, "job.sh")
        jobs = sorted((LocalJob(self._root, name) for name in names if job_number(name)), key=lambda job: job.number)
        requests = [(job, job.read_request()) for job in jobs if os.path.exists(job.marker) or job.read_ended()]
        return [Submitted(job.job_id) for job, request in requests if request and request.script == script]

    def _new_job(self) -> LocalJob:
        """Create a folder for a new job. Only one of two concurrent submissions can create it."""
        for name in ("active", "jobs"):
            make_folder(os.path.join(self._root, name))
        numbers = (job_number(name) for name in os.listdir(os.path.join(self._root, "jobs")))
        number = max((n for n in numbers if n is not None), default=0)
        while True:
            number += 1
            job = LocalJob(self._root, f"L{number}")
            try:
                os.mkdir(job.folder, 0o700)
            except FileExistsError:
                continue
            return job

    def _known(self, job_id: str) -> LocalJob | None:
        """The job, array or task of an array of that id."""
        if job_number(job_id) is None:
            return None
        job = LocalJob(self._root, job_id)
        request = job.read_request()
        if request is None:
            return None
        if job.element is not None and (request.array is None or job.element not in request.array):
            return None
        return job

    @contextlib.contextmanager
    def _view(self) -> Iterator[queue.QueueView]:
        """The queue, held still: between two unlocked readings a task could leave one list for another."""
        if not os.path.isdir(os.path.join(self._root, "active")):
            yield queue.QueueView((), {})
            return
        with Lock(self._root):
            yield queue.update(self._root)

    def queue(self) -> list[JobRecord]:
        """My jobs that have not ended, in the order of submission."""
        with self._view() as view:
            jobs = [record for entry in view.entries for record in records(entry.job, entry.request, view)]
        return [record for record in jobs if not record.state.ended]

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        """The records of these jobs, ended or not; an array gives one per task. Unknown ids give none."""
        accounted: list[JobRecord] = []
        with self._view() as view:
            for job_id in job_ids:
                job = self._known(job_id)
                request = job.read_request() if job is not None else None
                if job is None or request is None:
                    continue
                if request.array is not None and job.element is None:
                    for task in job.tasks():
                        accounted += records(task, request, view)
                accounted += records(job, request, view)
        return accounted

    def cancel(self, job_ids: Iterable[str]) -> None:
        """End these jobs: the waiting ones at once, the running ones as at their time limit.

        Raises UnknownJobError: one of the ids belongs to no job; then none is cancelled.
        """
        refuse_change("cancel")
        jobs = {job_id: self._known(job_id) for ids in job_ids for job_id in task_ids(ids)}
        unknown = [job_id for job_id, job in jobs.items() if job is None]
        if unknown:
            raise UnknownJobError(f"no local job {', '.join(unknown)} on {os.uname().nodename}")
        for job in jobs.values():
            if job is not None:
                queue.cancel(job)

    def show_jobs(self, job_ids: Collection[str]) -> list[JobRecord]:
        """As `account`: this queue keeps the files of all jobs."""
        return self.account(job_ids)

    def has_accounting(self) -> bool:
        """False: what the queue's files lack, they will not have later."""
        return False

    def history(
        self, user: str, *, job_ids: Collection[str] | None = None, since: float | None = None
    ) -> list[JobRecord]:
        """None: this queue has jobs of hpcjobs alone, which are in the user's index."""
        return []

    def full_id(self, number: str, user: str) -> str | None:
        """None: tasks of this queue have no ids of their own."""
        return None

    def step(self, job_id: str, hosts: Sequence[str], *options: str) -> list[str]:
        """An empty prefix: every step runs on this machine."""
        return []

    def estimate(self, job: Job) -> Estimate:
        """No start: how long the jobs before it will run is not known. A refusal where this machine is too small."""
        try:
            _refuse_larger(job, machine_cpus(), visible_gpus())
        except RequestError as error:
            return Estimate(refusal=error.message)
        return Estimate()

    def hold(self, job_ids: Iterable[str]) -> None:
        raise _refusal("hold", job_ids)

    def release(self, job_ids: Iterable[str]) -> None:
        raise _refusal("release", job_ids)

    def requeue(self, job_ids: Iterable[str]) -> None:
        raise _refusal("requeue", job_ids)

    def update(self, job_id: str, settings: Sequence[str]) -> None:
        raise _refusal("update", [job_id])

    def signal(self, job_ids: Iterable[str], name: str, *, batch_script: bool) -> None:
        raise _refusal("signal", job_ids)

    def query(self, argv: Sequence[str], *, cwd: str | None = None) -> str:
        raise RequestError(f"{argv[0]}: this machine's own queue has no Slurm to ask")

    def follow(self, argv: Sequence[str], each: Callable[[str], None]) -> int:
        raise RequestError(f"{argv[0]}: this machine's own queue has no Slurm to ask")

    def forget(self, job_ids: Iterable[str]) -> None:
        """Remove the files of jobs that have ended.

        Files of the newest job stay because ids continue from it, and so do files of dependencies of waiting jobs.
        """
        with self._view() as view:
            needed = {job_id.split("_")[0] for entry in view.entries for _, job_id in entry.request.dependency}
            needed |= {entry.job.submitted_job.job_id for entry in view.entries}
            folder = os.path.join(self._root, "jobs")
            numbers = [job_number(name) or 0 for name in os.listdir(folder)] if os.path.isdir(folder) else []
            needed.add(f"L{max(numbers, default=0)}")
            for job in (LocalJob(self._root, job_id) for job_id in {*job_ids} - needed):
                shutil.rmtree(job.folder, ignore_errors=True)  # a remaining file is harmless


def _refusal(verb: str, job_ids: Iterable[str]) -> RequestError:
    return RequestError(
        f"{verb} {', '.join(job_ids)}: jobs of this machine's own queue have no {verb}",
        hint=_INSTEAD.get(verb, "`hpcjobs cancel` ends a job"),
    )


def _start_supervisor(job: LocalJob, alive: int) -> None:
    """Start the job's supervisor; returns when the supervisor has put itself into the background.

    It ignores the user's site-packages and PYTHON variables, and passes the variables on to the job. Its mark is empty,
    and the GPU variables of an enclosing job are removed: it does not belong to that job.
    """
    environment = clean_env() | {MARK: ""}
    if os.environ.get(MARK):
        for name in queue.CHOICES:
            environment.pop(name, None)
    with open(job.path("supervisor.log"), "xb") as log:
        command = [sys.executable, "-ESm", "hpcjobs.scheduler.local.supervisor", job.folder, str(alive)]
        code = start(
            command,
            cwd=str(_PACKAGE_ROOT),
            env=environment,
            stdout=log,
            stderr=log,
            inherited=(alive,),
            new_session=True,
        ).wait()
    if code != 0:
        log_text = Path(job.path("supervisor.log")).read_text(errors="replace").strip()
        queue.finish(job, Ended("FAILED", time.time(), reason="supervisor did not start"))
        raise SchedulerError(f"the supervisor of {job.job_id} did not start: {log_text or f'exit code {code}'}")


def records(job: LocalJob, request: Request, view: queue.QueueView) -> Iterator[JobRecord]:
    """Yield one record. For a whole array it covers the tasks without a folder, if any."""
    if request.array is None or job.element is not None:
        # Also of a task with a folder: the supervisor of its array was killed before it could run.
        never_ran = job.element is not None and not os.path.exists(job.marker) and job.read_ended() is None
        yield _record(job, job.submitted_job if never_ran else job, request, view)
        return
    known = {task.element for task in job.tasks()}
    waiting = [index for index in request.array if index not in known]
    if waiting:
        yield _record(job._replace(job_id=f"{job.job_id}_[{array_text(waiting)}]"), job, request, view)


def _record(shown: LocalJob, job: LocalJob, request: Request, view: queue.QueueView) -> JobRecord:
    """The record from the files of ``job``, with the id of ``shown``."""
    started, ended = job.read_started(), job.read_ended() or view.unrecorded.get(job.job_id)
    verdict = view.verdicts.get(job.submitted_job.job_id)
    reason = verdict.reason if isinstance(verdict, Wait) else None
    if ended is not None:
        state, reason = State.parse(ended.state), ended.reason
    elif started is not None:
        state, reason = (State.COMPLETING, queue.CANCELLED) if job.cancelled else (State.RUNNING, None)
    elif job.cancelled:
        state, reason = State.CANCELLED, queue.CANCELLED
    else:
        state = State.PENDING
    until = ended.ended if ended is not None else time.time()
    return JobRecord(
        job_id=shown.job_id,
        state=state,
        source="local",
        name=request.name,
        reason=reason,
        node_list=os.uname().nodename if started is not None else None,
        nnodes=1,
        submitted=request.submitted,
        started=started.started if started is not None else None,
        ended=ended.ended if ended is not None else None,
        elapsed_s=until - started.started if started is not None else None,
        exit_code=ended.exit_code if ended is not None else None,
        signal=ended.signal if ended is not None else None,
        cpu_s=ended.cpu_s if ended is not None else None,
        max_rss_bytes=ended.max_rss_bytes if ended is not None else None,
        command=request.script,
        time_limit_s=request.time_limit_s,
    )


def connect(slurm_conf: str | None, *, runner: Runner) -> LocalScheduler:
    """The queue of this machine: it has no configuration file, and is read without commands."""
    return LocalScheduler()
