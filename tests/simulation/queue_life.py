"""The life of this machine's queue: jobs are submitted and cancelled, and their supervisors are killed.

The decisions and the files are the package's; supervisors take turns in virtual time, and run nothing. No more CPUs and
GPUs than there are may be in use, each job starts once, in order and after those that it depends on, and all end.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from life import Life, Schedule
from world import Process

from hpcjobs.scheduler.local import queue, supervisor
from hpcjobs.scheduler.local.queue import Ended, LocalJob, Never, Request, Started, Wait, activate

WAKE = 1
CPUS, GPUS = 8, 2
BUSY_S = 2000.0
"""Jobs are submitted, cancelled and killed within this time."""
SOON_S = 5.0
"""A wake-up takes no time, and who waits for a killed supervisor looks every second (`supervisor.CHECK_S`)."""
MET: dict[str, Callable[[str], bool]] = {
    "afterok": lambda state: state == "COMPLETED",
    "afterany": lambda state: True,
    "afternotok": lambda state: state != "COMPLETED",
}
"""By the state in which a job ended: whether one that depends on it may start."""


class Script(NamedTuple):
    """A script that runs: what it has of the machine."""

    process: Process
    request: Request
    gpus: tuple[str, ...]


class QueueLife(Life):
    """A machine with its queue, and what ran on it."""

    def __init__(self, schedule: Schedule, home: Path) -> None:
        super().__init__(schedule, home)
        self.root = str(home / "local")
        self.supervisors: dict[str, Process] = {}
        """Who holds the lock that shows that a job has a supervisor."""
        self.lock_holder: Process | None = None
        self.active: dict[str, Request] = {}
        """Jobs that were submitted."""
        self.active_since: dict[str, float] = {}
        self.durations_s: dict[str, float] = {}
        self.codes: dict[str, int] = {}
        self.started: dict[str, float] = {}
        self.scripts: dict[str, Script] = {}
        self.ended: dict[str, str] = {}
        """What became of each script, by the job's or task's id."""
        self.cancelled: dict[str, float] = {}
        self.overdue: str | None = None
        """The job that was the first in turn with room at the last look."""

    @contextmanager
    def seams(self) -> Iterator[None]:
        """Locks, wake-ups and the ends of processes are the world's."""
        life = self

        class Lock:
            def __init__(self, root: str) -> None:
                pass

            def __enter__(self) -> None:
                while (holder := life.lock_holder) is not None and holder.alive:
                    life.world.sleep(0.01)
                life.lock_holder = life.world.current

            def __exit__(self, *_: object) -> None:
                if life.lock_holder is life.world.current:
                    life.lock_holder = None

        def make(job: LocalJob) -> int:
            assert life.world.current is not None
            life.supervisors[job.job_id] = life.world.current
            return -1

        def is_alive(job: LocalJob) -> bool:
            return job.job_id in life.supervisors and life.supervisors[job.job_id].alive

        def wake(job: LocalJob) -> None:
            if is_alive(job):
                life.world.signal(life.supervisors[job.job_id], WAKE)

        def end_abandoned(job: LocalJob, *, grace_s: float) -> Ended:
            life._end_script(job.job_id, "FAILED")
            return Ended("FAILED", life.world.now, reason=queue.KILLED)

        with (
            patch.object(queue, "Lock", Lock), patch.object(queue, "make", make),
            patch.object(queue, "is_alive", is_alive), patch.object(queue, "wake", wake),
            patch.object(queue, "end_abandoned", end_abandoned),
        ):  # fmt: skip
            yield

    # --- supervisors

    def submit(self, request: Request, *, dependency: str | None, duration_s: float, code: int) -> None:
        """As the client does."""
        for name in ("active", "jobs"):
            os.makedirs(f"{self.root}/{name}", exist_ok=True)
        job = LocalJob(self.root, f"L{len(os.listdir(f'{self.root}/jobs')) + 1}")
        while True:
            try:
                os.mkdir(job.folder)
                break
            except FileExistsError:  # of a submission at the same time
                job = LocalJob(self.root, f"L{job.number + 1}")
        queue.make(job)
        others = [name for name in self.active if name != job.job_id]
        if dependency is not None and others:
            request = request._replace(dependency=((dependency, self.world.random.choice(others)),))
        self.durations_s[job.job_id], self.codes[job.job_id] = duration_s, code
        job.write(request._replace(job_id=job.job_id))
        activate(job)
        self.active[job.job_id], self.active_since[job.job_id] = request, self.world.now
        self._start(job, lambda: self._supervise(job, request))

    def _start(self, job: LocalJob, main: Callable[[], None]) -> Process:
        process = self.user(f"supervisor {job.job_id}", main, host="here")
        self.supervisors[job.job_id] = process
        return process

    def _supervise(self, job: LocalJob, request: Request) -> None:
        """As `hpcjobs.scheduler.local.supervisor`."""
        tasks: list[Process] = []
        while True:
            turn = supervisor._repeat_while_full(lambda: queue.claim(job))
            if isinstance(turn, queue.Claim):
                if request.array is None:
                    self._run(job, request, turn.started)
                    return
                tasks.append(self._start(turn.job, lambda turn=turn: self._run(turn.job, request, turn.started)))  # type: ignore[misc]
                continue
            if isinstance(turn, Never):
                self._check_never(job, request)
                supervisor._finish(job, Ended("CANCELLED", self.world.now, reason=turn.reason))
                return
            if turn is None and not any(process.alive for process in tasks):
                if request.array is not None and job.read_ended() is None:
                    ends = [task.read_ended() for task in job.tasks()]
                    bad = [end.state for end in ends if end is not None and end.state != "COMPLETED"]
                    state = "CANCELLED" if job.cancelled else bad[0] if bad else "COMPLETED"
                    supervisor._finish(job, Ended(state, self.world.now))
                return
            self._wait(turn, tasks)

    def _wait(self, turn: Wait | None, tasks: list[Process]) -> None:
        watch = turn.watch if turn is not None else ()
        while not self.world.wait_signals(supervisor.CHECK_S if watch or tasks else None):
            if any(other.read_ended() is not None or not queue.is_alive(other) for other in watch):
                break
            if any(not process.alive for process in tasks):  # SIGCHLD
                break
        tasks[:] = [process for process in tasks if process.alive]

    def _run(self, job: LocalJob, request: Request, started: Started) -> None:
        world = self.world
        self._check_start(job, request, started)
        assert world.current is not None
        self.started[job.job_id] = world.now
        self.scripts[job.job_id] = Script(world.current, request, started.gpus)
        end, state = world.now + self.durations_s[job.submitted_job.job_id], "COMPLETED"
        code = self.codes[job.submitted_job.job_id]
        while world.now < end:
            world.wait_signals(end - world.now)
            if job.cancelled:
                state = "CANCELLED"
                break
        self._end_script(job.job_id, "FAILED" if code and state == "COMPLETED" else state)
        supervisor._finish(job, Ended(self.ended[job.job_id], world.now, exit_code=code))

    def _end_script(self, job_id: str, state: str) -> None:
        if self.scripts.pop(job_id, None) is not None:
            self.ended[job_id] = state
            self.world.log(f"{job_id} ends: {state}")

    # --- what must hold

    def _outcome(self, job_id: str) -> str | None:
        """How hpcjobs says that the job ended; an array completed if all its tasks did."""
        state = queue.outcome(LocalJob(self.root, job_id))
        request = self.active.get(job_id)
        if request is None or request.array is None or state in (None, "UNKNOWN"):
            return state
        ends = [self.ended.get(f"{job_id}_{task}") for task in request.array]
        is_disturbed = job_id in self.cancelled or any(f"supervisor {job_id}" in line for line in self.world.trace)
        if all(end == "COMPLETED" for end in ends) != (state == "COMPLETED") and not (
            is_disturbed and state != "COMPLETED"
        ):
            self.errors.append(f"{job_id} is {state}, and its tasks ended as {ends}")
        return state

    def _check_start(self, job: LocalJob, request: Request, started: Started) -> None:
        self.world.log(f"{job.job_id} starts: {request.cpus} CPUs, GPUs {started.gpus}")
        # A killed supervisor's script ends with it; its slots are free once that is recorded.
        running = dict(self.scripts)
        cpus = sum(script.request.cpus for script in running.values()) + request.cpus
        gpus = [name for script in running.values() for name in script.gpus]
        if cpus > CPUS:
            self.errors.append(f"{job.job_id} starts, and {cpus} CPUs of {CPUS} are in use")
        if set(gpus) & set(started.gpus) or len(started.gpus) != request.gpus:
            self.errors.append(f"{job.job_id} starts with GPUs {started.gpus} of {request.gpus}, and {gpus} are in use")
        if job.job_id in self.started:
            self.errors.append(f"{job.job_id} starts a second time")
        if self.cancelled.get(job.submitted_job.job_id, self.world.now) < self.world.now - 1.0:
            self.errors.append(f"{job.job_id} starts, and was cancelled")
        siblings = [one for one in running if one.startswith(f"{job.submitted_job.job_id}_")]
        if request.throttle is not None and len(siblings) >= request.throttle:
            self.errors.append(f"{job.job_id} starts while {siblings} run, and the limit is {request.throttle}")
        for kind, other in request.dependency:
            state = self._outcome(other)
            if state is None or not MET[kind](state):
                self.errors.append(f"{job.job_id} starts {kind} {other}, which is {state}")
        free = CPUS - cpus
        for name, before in self.active.items():
            one = LocalJob(self.root, name)
            if (
                one.number >= job.number
                or self.active_since[name] > started.started - 0.1
                or before.dependency
                or before.array is not None
                or before.cpus <= free
            ):
                continue
            if one.read_started() is None and one.read_ended() is None and queue.is_alive(one):
                self.errors.append(f"{job.job_id} starts before {name}, which then has no room")

    def _check_never(self, job: LocalJob, request: Request) -> None:
        """A job is ended for its dependencies only if one of them can never be met."""
        states = [(kind, other, self._outcome(other)) for kind, other in request.dependency]
        if all(state is None or MET[kind](state) for kind, _, state in states):
            self.errors.append(f"{job.job_id} is ended for its dependencies, which are {states}")

    def _first_in_turn(self) -> str | None:
        """The first job that waits for room alone, and the task that it starts next; None if it has no room."""
        cpus = CPUS - sum(script.request.cpus for script in self.scripts.values())
        gpus = GPUS - sum(len(script.gpus) for script in self.scripts.values())
        alive = [LocalJob(self.root, name) for name in self.active if self.supervisors[name].alive]
        for job in sorted(alive, key=lambda job: job.number):
            request = self.active[job.job_id]
            tasks = [f"{job.job_id}_{index}" for index in request.array] if request.array else [job.job_id]
            waiting = [task for task in tasks if task not in self.started]
            running = [task for task in tasks if task in self.scripts]
            if not waiting or job.cancelled:
                continue
            states = [(kind, self._outcome(other)) for kind, other in request.dependency]
            if any(state is None or not MET[kind](state) for kind, state in states):
                continue
            if request.throttle is None or len(running) < request.throttle:
                return waiting[0] if request.cpus <= cpus and request.gpus <= gpus else None
        return None

    def _look_for_overdue(self) -> None:
        """The first in turn starts soon once it has room."""
        first = self._first_in_turn()
        if first is not None and first == self.overdue:
            self.errors.append(f"{first} is the first in turn and has room, and does not start within {SOON_S:.0f} s")
        self.overdue = first

    def check(self) -> None:
        """All jobs have ended as their scripts did."""
        for job_id in self.active:
            job = LocalJob(self.root, job_id)
            state = self._outcome(job_id)
            if state is None and job.read_request() is not None and os.path.exists(job.marker):
                self.errors.append(f"{job_id} never ends")
            script = self.ended.get(job_id)
            # Its supervisor ended as it recorded the end.
            is_killed = state == "FAILED" and any(f"supervisor {job_id}: " in line for line in self.world.trace)
            if script is not None and state not in (None, "UNKNOWN", script) and not is_killed:
                self.errors.append(f"{job_id} is {state}, and its script {script}")
        if self.scripts:
            self.errors.append(f"{sorted(self.scripts)} run for ever")

    # --- the schedule

    def prepare(self) -> None:
        draw = self.world.random
        for number in range(draw.choice((3, 6, 10))):
            array = tuple(range(draw.choice((2, 4)))) if draw.random() < 0.3 else None
            request = Request(
                job_id="", name="x", run_dir=str(self.home), script="job.sh", cwd=str(self.home),
                submitted=self.world.now, cpus=draw.choice((1, 2, 4, 8)), gpus=draw.choice((0, 0, 1, 2)),
                machine_cpus=CPUS, machine_gpus=GPUS, grace_s=1.0, array=array,
                throttle=draw.choice((None, 1, 2)) if array else None,
            )  # fmt: skip
            deed = functools.partial(
                self.submit, request,
                dependency=draw.choice((None, None, None, "afterok", "afterany", "afternotok")),
                duration_s=draw.choice((0.0, 5.0, 100.0)), code=draw.choice((0, 0, 1)),
            )  # fmt: skip
            at = draw.choice((0.0, draw.uniform(0, 300)))
            self.user(f"submit {number}", deed, delay_s=at)
            if draw.random() < 0.2:
                cancel = functools.partial(self._cancel, f"L{number + 1}")
                self.user("cancel", cancel, delay_s=at + draw.uniform(0, 200))
            if draw.random() < 0.15:
                self.world.after(at + draw.uniform(0, 200), functools.partial(self._kill, f"L{number + 1}"))
        for number in range(int(BUSY_S / SOON_S)):
            self.world.after(number * SOON_S, self._look_for_overdue)
        for _ in range(draw.randrange(3)):
            self.user("ps", self._ps, delay_s=draw.uniform(0, BUSY_S))

    def _cancel(self, job_id: str) -> None:
        if job_id in self.active:
            queue.cancel(LocalJob(self.root, job_id))
            self.cancelled[job_id] = self.world.now
            self.world.after(SOON_S, functools.partial(self._check_cancelled, job_id))
            self.world.log(f"cancelled {job_id}")

    def _check_cancelled(self, job_id: str) -> None:
        """No script of a cancelled job runs, but those of killed supervisors, whom nobody need have noticed."""
        running = [one for one, script in self.scripts.items() if script.process.alive]
        left = [one for one in running if LocalJob(self.root, one).submitted_job.job_id == job_id]
        if left:
            self.errors.append(f"{left} run, and {job_id} was cancelled")

    def _kill(self, job_id: str) -> None:
        """The supervisor of a job, or of one of its tasks."""
        alive = [name for name, p in self.supervisors.items() if name.partition("_")[0] == job_id and p.alive]
        if alive:
            self.world.kill(self.supervisors[self.world.random.choice(alive)])

    def _ps(self) -> None:
        if os.path.isdir(f"{self.root}/active"):
            with queue.Lock(self.root):
                queue.update(self.root)

    def quieten(self) -> None:
        """No fault happens any more; whoever looks at the queue marks jobs of killed supervisors."""
        self.end_faults()
        self.world.run(3600.0)
        for _ in range(2):
            self.user("last ps", self._ps)
            self.world.run(3600.0)
