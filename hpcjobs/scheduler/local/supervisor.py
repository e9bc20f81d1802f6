"""``python -m hpcjobs.scheduler.local.supervisor JOBDIR FD``: waits for a local job's turn, then has it run.

FD is the handle that holds the job's lock. The process puts itself into the background: once the command
has returned, the job is supervised.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from hpcjobs.files import FULL, file_name
from hpcjobs.processes import tree
from hpcjobs.processes.fork import (
    Guard,
    SupervisorEvents,
    adopt_orphans,
    continue_in_background,
    die_with_parent,
    fork_call,
    start_child,
)
from hpcjobs.scheduler.local import queue
from hpcjobs.scheduler.local.queue import (
    Ended,
    LocalJob,
    Never,
    Request,
    Started,
    Wait,
    assign_gpus,
    is_alive,
    user_choice,
)

CHECK_S = 1.0
"""Interval at which a waiting supervisor checks that the jobs it waits for were not killed."""


_ROOM_S = 1.0
"""Between tries to write to a disk that has no room."""
T = TypeVar("T")


def _repeat_while_full(act: Callable[[], T]) -> T:
    """Do ``act``, again while the queue's disk has no room: a supervisor that gave up would lose how its job ended."""
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in FULL:
                raise
        time.sleep(_ROOM_S)


def _finish(job: LocalJob, ended: Ended) -> None:
    _repeat_while_full(lambda: queue.finish(job, ended))


def main(argv: list[str]) -> int:
    folder, alive = argv
    # A script that inherits the lock would hold it when this process is killed, and the job would seem supervised.
    os.set_inheritable(int(alive), False)
    jobs, name = os.path.split(folder)
    job = LocalJob(os.path.dirname(jobs), name)
    request = job.read_request()
    if request is None:
        print(f"no request in {folder}", file=sys.stderr)
        return 1
    events = SupervisorEvents(job.path("wake"))
    continue_in_background()
    array = _Array(job, request, int(alive)) if request.array is not None else None
    _wait_for_turns(job, request, events, array)
    return 0


class _Array:
    """Supervisor of an array: wait for each task's turn, and start the task's supervisor."""

    def __init__(self, job: LocalJob, request: Request, alive: int) -> None:
        self._job, self._request, self._alive = job, request, alive
        self.running: set[int] = set()

    def start(self, claim: queue.Claim, events: SupervisorEvents) -> None:
        pid = fork_call(lambda: self._supervise(claim, events))
        if claim.alive is not None:
            os.close(claim.alive)
        self.running.add(pid)

    def _supervise(self, claim: queue.Claim, events: SupervisorEvents) -> None:
        """Run one task to its end, in a new process."""
        # The array's lock shows that the supervisor of the array lives: this process must not hold it.
        os.close(self._alive)
        events.close()
        os.setsid()
        run(claim.job, self._request, claim.started)

    def reap(self) -> None:
        for pid in list(self.running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.running.discard(pid)

    def finish(self) -> None:
        ends = [task.read_ended() for task in self._job.tasks()]
        codes = [end.exit_code or 0 for end in ends if end is not None]
        bad = [end.state for end in ends if end is not None and end.state != "COMPLETED"]
        state = "CANCELLED" if self._job.cancelled else bad[0] if bad else "COMPLETED"
        _finish(self._job, Ended(state, time.time(), exit_code=max(codes, default=None)))


def _wait_for_turns(job: LocalJob, request: Request, events: SupervisorEvents, array: _Array | None) -> None:
    """Until the job, or the last task of the array, has ended."""
    while True:
        turn = _repeat_while_full(lambda: queue.claim(job))
        if isinstance(turn, queue.Claim):
            if array is None:
                events.close()
                run(job, request, turn.started)
                return
            array.start(turn, events)
            continue
        if isinstance(turn, Never):
            _finish(job, Ended("CANCELLED", time.time(), reason=turn.reason))
            return
        if turn is None and (array is None or not array.running):
            if array is not None and job.read_ended() is None:
                array.finish()
            return
        _wait(turn, events, array)
        if events.stop_requested:
            queue.cancel(job)


def _wait(turn: Wait | None, events: SupervisorEvents, array: _Array | None) -> None:
    """Wait until an event arrives, or a job that is waited for has ended or was killed."""
    watch = turn.watch if turn is not None else ()
    while not events.wait(CHECK_S if watch else None):
        if any(other.read_ended() is not None or not is_alive(other) for other in watch):
            break
    if array is not None:
        array.reap()


AGAIN = "again"
"""A file in the job's folder: the script creates it to be started again (``--retries``)."""
_KILL_AGAIN_S = 5.0
"""A process that survives SIGKILL is in the kernel, waiting for a device or a server."""


class _Stop(NamedTuple):
    """The job is being ended, and this is why."""

    state: str
    reason: str
    kill_at: float


class _Run:
    """The processes of a running job, as their supervisor sees them."""

    def __init__(self, job: LocalJob, request: Request, leader: int) -> None:
        self._job, self._request, self.leader = job, request, leader
        self.identity = tree.identity(leader)
        self._begun = time.monotonic()
        self._early = request.early_signal
        self.status: int | None = None
        self.stop: _Stop | None = None
        self.cpu_s = 0.0
        self.max_rss_bytes = 0

    def reap(self, guard: int) -> bool:
        """Wait for every process that ended; False: no process is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == guard:
                continue
            self.cpu_s += usage.ru_utime + usage.ru_stime
            self.max_rss_bytes = max(self.max_rss_bytes, usage.ru_maxrss * 1024)
            if pid == self.leader:
                self.status = status

    def act(self, *, stop_requested: bool) -> None:
        """Send the early signal, end the job by time limit or cancellation, or kill it, if due."""
        now, limit = time.monotonic() - self._begun, self._request.time_limit_s
        if self.stop is not None:
            if time.monotonic() >= self.stop.kill_at:
                tree.end(self.members, grace_s=0)
                self.stop = self.stop._replace(kill_at=time.monotonic() + _KILL_AGAIN_S)
            return
        if self._early is not None and limit is not None and now >= limit - self._early.before_s:
            tree.send(self._early_targets(), self._early.number)
            self._early = None
        if stop_requested or self._job.cancelled:
            self._begin_to_stop(
                "CANCELLED", "supervisor was stopped by a signal" if stop_requested else queue.CANCELLED
            )
        elif limit is not None and now >= limit:
            self._begin_to_stop("TIMEOUT", "TimeLimit")

    def _begin_to_stop(self, state: str, reason: str) -> None:
        """Signal the script's process group; the launcher in it signals the tasks, each once."""
        self.stop = _Stop(state, reason, time.monotonic() + self._request.grace_s)
        os.killpg(self.leader, signal.SIGTERM)

    def _early_targets(self) -> list[int]:
        """The script alone; or, as Slurm's steps, all but the script and the launchers it started."""
        assert self._early is not None
        if self._early.script_only:
            return [self.leader]
        return [p for p in self.members() if p != self.leader and tree.parent(p) != self.leader]

    def members(self) -> list[int]:
        return tree.members(self._job.folder, self.identity, adopted_by=os.getpid())

    def time_until_due_s(self) -> float | None:
        """Seconds until the next action; None: no action."""
        if self.stop is not None:
            return self.stop.kill_at - time.monotonic()
        limit = self._request.time_limit_s
        if limit is None:
            return None
        due = limit - (self._early.before_s if self._early is not None else 0)
        return self._begun + due - time.monotonic()


def run(job: LocalJob, request: Request, started: Started) -> None:
    """Run the script to its end, and again as often as it asks for that; then record its end."""
    adopt_orphans()
    events = SupervisorEvents(job.path("wake"))
    try:
        log = os.open(_log(job, request), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _finish(job, Ended("FAILED", time.time(), exit_code=1, reason=f"cannot write the log: {error}"))
        return
    cpu_s, most_bytes, restarts = 0.0, 0, 0
    while True:
        run, again = _once(job, request, started, log, events, restarts=restarts)
        cpu_s, most_bytes = cpu_s + run.cpu_s, max(most_bytes, run.max_rss_bytes)
        if not again:
            break
        restarts += 1
    _finish(job, _make_record(run)._replace(cpu_s=round(cpu_s, 3), max_rss_bytes=most_bytes))


def _once(
    job: LocalJob, request: Request, started: Started, log: int, events: SupervisorEvents, *, restarts: int
) -> tuple[_Run, bool]:
    """One start of the script, until it and all that it left behind have ended; and whether there is to be another."""
    # The guard, which still holds the job's lock, ends the job as at its time limit.
    guard = Guard(lambda: _finish(job, queue.end_abandoned(job, grace_s=request.grace_s)))
    leader = _start_script(job, request, started, log, restarts=restarts)
    run = _Run(job, request, leader)
    # Whoever finds this process killed ends the processes of this leader.
    _repeat_while_full(lambda: job.write(started._replace(leader=run.identity)))
    while True:
        run.reap(guard.pid)
        if run.status is not None:
            break
        run.act(stop_requested=events.stop_requested)
        events.wait(run.time_until_due_s())
    guard.release()
    if run.reap(guard.pid):
        grace_s = run.stop.kill_at - time.monotonic() if run.stop is not None else 0.0
        tree.end(run.members, grace_s=grace_s)
        run.reap(guard.pid)
    again = _take_restart_request(job) and not job.cancelled and not events.stop_requested
    return run, again


def _take_restart_request(job: LocalJob) -> bool:
    try:
        os.unlink(job.path(AGAIN))
    except FileNotFoundError:
        return False
    return True


def _log(job: LocalJob, request: Request) -> str:
    return os.path.join(request.run_dir, "logs", f"{file_name(request.name)}_{job.job_id}.out")


def _start_script(job: LocalJob, request: Request, started: Started, log: int, *, restarts: int) -> int:
    """Start the script in a new session; it gets SIGTERM when its supervisor dies."""
    environment = os.environ | _environment(job, request, started)
    environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    supervisor = os.getpid()
    led, leads = os.pipe()

    def prepare() -> None:
        os.setsid()
        os.close(leads)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request.cwd)
        die_with_parent(supervisor, signal.SIGTERM)

    pid = start_child(["bash", request.script], environment, prepare)
    os.close(leads)
    os.read(led, 1)  # ends when the child leads its session: from then on there is a group to signal
    os.close(led)
    return pid


def _environment(job: LocalJob, request: Request, started: Started) -> dict[str, str]:
    added = {"HPCJOBS_JOB_ID": job.job_id, tree.MARK: job.folder, "HPCJOBS_AGAIN": job.path(AGAIN)}
    if request.time_limit_s is not None:
        added["HPCJOBS_DEADLINE"] = str(int(time.time() + request.time_limit_s))
    if request.gpus or (request.machine_gpus and user_choice(os.environ) is None):
        # None for a job without GPUs: it must not see other jobs' GPUs, unless its user selects some.
        added |= assign_gpus(started.gpus)
    if job.element is not None and request.array is not None:
        added["SLURM_ARRAY_TASK_ID"] = str(job.element)
        added["SLURM_ARRAY_JOB_ID"] = job.submitted_job.job_id
        added["SLURM_ARRAY_TASK_COUNT"] = str(len(request.array))
        added["SLURM_ARRAY_TASK_MIN"] = str(min(request.array))
        added["SLURM_ARRAY_TASK_MAX"] = str(max(request.array))
    return added


def _make_record(run: _Run) -> Ended:
    """Exit code as the shell counts: 128 + signal for a script that a signal ended."""
    assert run.status is not None
    code = os.waitstatus_to_exitcode(run.status)
    number = -code if code < 0 else None
    exit_code = code if number is None else 128 + number
    if run.stop is not None:
        state, reason = run.stop.state, run.stop.reason
    elif exit_code == 0:
        state, reason = "COMPLETED", None
    else:
        state, reason = "FAILED", "NonZeroExitCode" if number is None else f"RaisedSignal:{number}"
    return Ended(
        state=state,
        ended=time.time(),
        exit_code=exit_code,
        signal=number,
        reason=reason,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
