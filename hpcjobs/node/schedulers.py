"""Interface of a scheduler on the node: the time left, the cause of an end, another start."""

import math
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from subprocess import TimeoutExpired
from typing import Callable, Dict, List, NamedTuple, Optional

from hpcjobs import slurm_commands
from hpcjobs.node import decide
from hpcjobs.processes import start
from hpcjobs.processes.start import Result


class Limit(NamedTuple):
    """A job's time limit, from the scheduler."""

    left_s: float
    """Seconds until the limit when it was read; infinity: no limit."""
    total_s: float


class Clock:
    """The time a job has left, between two answers of the scheduler."""

    def __init__(self, monotonic: Callable[[], float], limit: Optional[Limit]) -> None:
        self._monotonic = monotonic
        self._end, self.total_s = math.inf, math.inf
        self.update(limit)

    def update(self, limit: Optional[Limit]) -> None:
        """Take a new answer; None: there was none, and the one before remains valid."""
        if limit is not None:
            self._end, self.total_s = self._monotonic() + limit.left_s, limit.total_s

    @property
    def left_s(self) -> float:
        return self._end - self._monotonic()


def signal_time_s(*, fixed_s: Optional[int], measured_s: int, total_s: float, warning_s: int) -> float:
    """How long before the limit the program gets its signal.

    The user's value, or the program's measurement, or a quarter of the limit, at most ``warning_s``.
    """
    if fixed_s is not None:
        return fixed_s
    return measured_s or min(total_s / 4, warning_s)


TIMEOUT_S = 30.0
"""slurmctld answers within seconds, or is down."""


Run = Callable[[List[str], Dict[str, str]], Result]


def run(argv: List[str], env: Dict[str, str]) -> Result:
    """Run ``argv`` with exactly ``env``. Exit code 127: it could not be started; 124: it did not end in time."""
    try:
        return start.run(argv, env=env, timeout_s=TIMEOUT_S, errors="replace")
    except OSError as error:
        return Result(127, "", f"{argv[0]}: {error.strerror}")
    except TimeoutExpired:
        return Result(124, "", f"{argv[0]} did not answer within {TIMEOUT_S:.0f} s")


def outside_job(environ: Dict[str, str]) -> Dict[str, str]:
    """``environ`` without Slurm's variables of this job and a user's defaults for Slurm's commands."""
    ours = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_", "SCONTROL_", "HPCJOBS_")
    exceptions = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in environ.items() if name in exceptions or not name.startswith(ours)}


KILL_WAIT_S = 30.0
"""Slurm's own default, which most sites leave."""


RESUBMITTED = "resubmitted as"
"""Beginning of the decision that another job continues; its id follows."""


class RestartOutcome(NamedTuple):
    """Result of a request for another attempt."""

    decision: str
    """``requeued``, ``resubmitted as ID``, or ``ended:`` and the reason."""
    job_id: Optional[str] = None
    """Id of the job that continues this one."""


class NodeSideScheduler(ABC):
    """The scheduler as a job on its first node needs it; each method has an answer where the scheduler is silent."""

    job_id = ""
    """As the scheduler's commands want it; a task of an array by its array and index."""
    array_job_id = None  # type: Optional[str]
    """Id of the array, for an array task of Slurm: its raw id does not contain it."""
    restarts = 0
    """How often the scheduler has started this job again."""

    @abstractmethod
    def read_limit(self) -> Optional[Limit]:
        """The current time limit; None: unknown or unchanged."""

    @abstractmethod
    def read_cause(self) -> Optional[str]:
        """Why the scheduler ends this job: a cause, ``running``, ``cancelled``, ``requeued`` or ``failed``."""

    def read_kill_wait_s(self) -> float:
        """How long after SIGTERM the scheduler sends SIGKILL."""
        return KILL_WAIT_S

    def read_queued_at(self) -> Optional[float]:
        """When this start of the job was put into the queue, in seconds since 1970; None: unknown."""
        return None

    @abstractmethod
    def read_earlier_cause(self, job_id: str) -> str:
        """The cause that ended ``job_id`` if its end was not recorded."""

    def node_names(self, nodes: str) -> List[str]:
        """The names in a list of nodes; none where this scheduler has one machine."""
        return []

    @abstractmethod
    def start_again(self, suspects: List[str], *, as_another_job: bool = True) -> RestartOutcome:
        """Start another attempt, if possible without ``suspects``; the newest suspects matter most.

        ``as_another_job``: where this job cannot start again, another one may continue it.
        """

    @abstractmethod
    def cancel(self) -> None:
        """End this job for good."""

    @abstractmethod
    def hold(self) -> str:
        """Put the job back into the queue, to wait there until its user releases it; a message about it."""


class Local(NodeSideScheduler):
    """The queue of one machine: a supervisor starts the script again, with the CPUs and GPUs that the job has."""

    def __init__(self, environ: Dict[str, str]) -> None:
        self.job_id = environ.get("HPCJOBS_JOB_ID", "")
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._again = environ.get("HPCJOBS_AGAIN", "")
        self._deadline = environ.get("HPCJOBS_DEADLINE", "")
        self._limit: Optional[float] = None

    def read_limit(self) -> Optional[Limit]:
        """Read once: the supervisor's limit never changes, and its clock is this one."""
        if not self._deadline.isdigit() or self._limit is not None:
            return None
        self._limit = float(self._deadline) - time.time()
        return Limit(self._limit, self._limit)

    def read_cause(self) -> Optional[str]:
        return None

    def read_earlier_cause(self, job_id: str) -> str:
        return decide.PREEMPT

    def start_again(self, suspects: List[str], *, as_another_job: bool = True) -> RestartOutcome:
        try:
            os.close(os.open(self._again, os.O_WRONLY | os.O_CREAT, 0o600))
        except OSError as error:
            return RestartOutcome("ended: {}: {}".format(self._again or "no HPCJOBS_AGAIN", error.strerror))
        return RestartOutcome(decide.CONTINUES)

    def cancel(self) -> None:
        """Its queue never starts a cancelled job again."""

    def hold(self) -> str:
        return "submit it again when its run folder can be read"


_REASONS = {"TimeLimit": decide.TIMEOUT, "NodeDown": decide.NODE}
_STATES = {
    **dict.fromkeys(("RUNNING", "CONFIGURING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED"), decide.RUNNING),
    "TIMEOUT": decide.TIMEOUT,
    "PREEMPTED": decide.PREEMPT,
    "NODE_FAIL": decide.NODE,
    "BOOT_FAIL": decide.NODE,
}
_FAILURES = ("NonZeroExitCode", "JobLaunchFailure", "RaisedSignal", "OutOfMemory")
"""Reasons of a job whose batch script ended or was killed, by version of Slurm; a cancelled job has none of them."""
_UNFINISHED = ("RUNNING", "PENDING", "COMPLETING", "REQUEUED", "REVOKED", "")
_PATIENCE_S = 300.0
"""Commands are repeated for this time while a controller restarts."""
_RETRY_S = 5.0
MOST_SUSPECTS = 8
"""The newest ones; each may cost a question whether the job is possible without it."""


class Slurm(NodeSideScheduler):
    """One job, or one task of an array, by Slurm's own commands."""

    def __init__(
        self,
        environ: Dict[str, str],
        run: Run,
        *,
        job_script: str,
        held: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        self.in_array = bool(array and task)
        self.array_job_id = array if self.in_array else None
        # The raw id of a task may be the array's own, and then it means all of its tasks.
        self.job_id = f"{array}_{task}" if self.in_array else environ.get("SLURM_JOB_ID", "")
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.nodes = environ.get("SLURM_JOB_NODELIST", "")
        self._run, self._script, self._held = run, job_script, held
        self._monotonic, self._wall, self._sleep = monotonic, wall, sleep
        self._job_env = outside_job(environ)
        self._env = dict(self._job_env, LC_ALL="C", SLURM_TIME_FORMAT="%s")
        self._began_monotonic, self._began_wall = monotonic(), wall()
        self._controller_epoch: Optional[float] = None

    # --- time limit

    def read_limit(self) -> Optional[Limit]:
        job = self._show()
        start, end = _epoch(job.get("StartTime")), _epoch(job.get("EndTime"))
        if start is None:
            return None
        if end is None:
            return Limit(math.inf, math.inf) if job.get("TimeLimit") == "UNLIMITED" else None
        return Limit(end - self._controller_now(start, end - start), end - start)

    def _controller_now(self, start: float, total_s: float) -> float:
        """The time by the controller's clock, which decides about the limit.

        Without a time from ``sdiag``, this process is taken to have begun when the job started, or later by the delay
        on this host's clock if that is at most a quarter of the time limit: a prolog may take time.
        """
        if self._controller_epoch is None:
            now = re.search(
                r"^sdiag output at .*\(([0-9]+)\)", self._call(slurm_commands.show_statistics()).out, re.MULTILINE
            )
            if now:
                self._controller_epoch = float(now.group(1)) - self._monotonic()
            else:
                delay = self._began_wall - start
                self._controller_epoch = start - self._began_monotonic + (delay if 0 <= delay <= total_s / 4 else 0)
        return self._controller_epoch + self._monotonic()

    # --- causes

    def read_cause(self) -> Optional[str]:
        return self._find_cause(self._show())

    def _find_cause(self, job: Dict[str, str]) -> Optional[str]:
        if not job:
            return None
        if int(job.get("Restarts", "0")) > self.restarts:  # state and reason already belong to the next start
            return decide.REQUEUED
        reason = job.get("Reason", "").partition(":")[0]
        cause = _REASONS.get(reason) or _STATES.get(job.get("JobState", ""))
        # A requeued job keeps the PreemptTime of an earlier start.
        preempted, started = _epoch(job.get("PreemptTime")), _epoch(job.get("StartTime"))
        if cause in (None, decide.RUNNING) and preempted is not None and preempted >= (started or 0):
            cause = decide.PREEMPT
        return cause or (decide.FAILED if reason in _FAILURES else decide.CANCELLED)

    def read_kill_wait_s(self) -> float:
        match = re.search(r"^KillWait\s*=\s*([0-9]+)", self._call(slurm_commands.show_config()).out, re.MULTILINE)
        return float(match.group(1)) if match else super().read_kill_wait_s()

    def read_queued_at(self) -> Optional[float]:
        return _epoch(self._show().get("SubmitTime"))

    def read_earlier_cause(self, job_id: str) -> str:
        question = slurm_commands.list_accounted(["State"], "|", jobs=[job_id], attempts=True)
        states = [(line.split() or [""])[0] for line in self._call(question).out.splitlines()]
        ended = [state for state in states if state not in _UNFINISHED]
        cause = _STATES.get(ended[-1]) if ended else None
        return cause or decide.PREEMPT

    # --- another attempt

    def start_again(self, suspects: List[str], *, as_another_job: bool = True) -> RestartOutcome:
        exclude = self._exclude(suspects)
        refusal = self._requeue("requeue")
        if refusal is None:
            if exclude:
                self._ask(slurm_commands.update(self.job_id, "ExcNodeList=" + exclude))
            return RestartOutcome(decide.CONTINUES)
        if refusal == decide.WAS_CANCELLED:
            return RestartOutcome(refusal)
        if self.in_array:
            return RestartOutcome(f"ended: {refusal}; a task of an array is not submitted again")
        return self._submit_again(refusal, exclude) if as_another_job else RestartOutcome(f"ended: {refusal}")

    def cancel(self) -> None:
        self._ask(slurm_commands.cancel([self.job_id]))

    def hold(self) -> str:
        refusal = self._requeue("requeuehold")
        if refusal is None:
            return f"job {self.job_id} is held: scontrol release {self.job_id} starts it when the folder is back"
        return f"not requeued: {refusal}"

    def _requeue(self, verb: str) -> Optional[str]:
        """Requeue the job; the reason why it was not, or None.

        A requeue undoes a cancellation that came before it. So the cause is read directly before each request.
        """
        give_up = self._monotonic() + _PATIENCE_S
        while True:
            cause = self._await_cause()
            if cause in (decide.CANCELLED, decide.REQUEUED):
                return decide.WAS_CANCELLED if cause == decide.CANCELLED else None
            answer = self._call(slurm_commands.control(verb, [self.job_id]))
            message = _one_line(answer.err or answer.out)
            # Pending: an earlier try was carried out, and its answer lost.
            if answer.code == 0 or "Job is pending execution" in message:
                return None
            if not slurm_commands.has_no_answer(answer.code, message) or self._monotonic() > give_up:
                return message or f"scontrol {verb} ended with code {answer.code}"
            self._sleep(_RETRY_S)

    def _await_cause(self) -> Optional[str]:
        """As `read_cause`, asked again while there is no answer; None: still none, or Slurm does not know the job."""
        give_up = self._monotonic() + _PATIENCE_S
        while True:
            answer = self._ask(slurm_commands.show_job(self.job_id, local=True))
            cause = self._find_cause(_fields(answer.out))
            if cause is not None or answer.code != 0 or self._monotonic() > give_up:
                return cause
            self._sleep(_RETRY_S)

    def _submit_again(self, refusal: str, exclude: str) -> RestartOutcome:
        """A job after this one, in the same run folder.

        sbatch may have submitted a job although its answer was lost, or before this process was killed. So the queue
        is read before each try, and the first of several jobs stays.
        """
        options = ["--dependency=afterany:" + self.job_id]
        log = _log_path()
        # This job's log: by default sbatch would name another file after the new job.
        options += ["--output=" + log.replace("%", "%%")] if log else []
        options += ["--exclude=" + exclude] if exclude else []
        give_up, tries = self._monotonic() + _PATIENCE_S, 0
        taken = self._find_continuations() or []
        while not taken:
            tries += 1
            # sbatch hands its environment on to the job.
            answer = self._run(slurm_commands.submit(self._script, *options), self._job_env)
            # A site's banner may surround the id, on standard output too.
            printed = [line.partition(";")[0] for line in answer.out.splitlines() if re.match(r"[0-9]+(;.*)?\Z", line)]
            # After an unusable answer an earlier try may have submitted too, and only the queue shows all.
            if answer.code == 0 and printed and tries == 1:
                taken = printed[-1:]
                break
            queued = self._find_continuations()
            taken = queued or (printed[-1:] if answer.code == 0 else [])
            if not taken:
                message = _one_line(answer.err or answer.out)
                is_lost = slurm_commands.has_no_answer(answer.code, message)
                if queued is None or not is_lost or self._monotonic() > give_up:
                    return RestartOutcome(f"ended: {refusal}; {message or 'no job id from sbatch'}")
                self._sleep(_RETRY_S)
        if taken[1:]:
            self._call(slurm_commands.cancel(taken[1:]))
        if self._await_cause() == decide.CANCELLED:  # just now, and whoever did so knows of this job alone
            self._ask(slurm_commands.cancel(taken[:1]))
            return RestartOutcome(decide.WAS_CANCELLED)
        if self._held:  # its user released it once
            self._call(slurm_commands.control("release", taken[:1]))
        return RestartOutcome(f"{RESUBMITTED} {taken[0]}", taken[0])

    def _find_continuations(self) -> Optional[List[str]]:
        """Later jobs that were given this job's script, oldest first; None: the queue cannot be read."""
        answer = self._ask(slurm_commands.list_queue(["JobID", "Command"], " ", mine=True, states=["all"]))
        if answer.code != 0:
            return None
        jobs = (line.strip().partition(" ") for line in answer.out.splitlines())
        ids = {int(job_id) for job_id, _, script in jobs if script == self._script and job_id.isdigit()}
        return [str(each) for each in sorted(ids) if each > int(self.job_id)]

    def node_names(self, nodes: str) -> List[str]:
        return self._call(slurm_commands.show_host_names(nodes)).out.split() if nodes else []

    def _exclude(self, suspects: List[str]) -> str:
        """The nodes to exclude from the next attempt, including the user's; empty: no change.

        If too few nodes are left, the oldest suspects are allowed again first. Without an answer nothing is changed.
        """
        if not suspects:
            return ""
        job = self._ask(slurm_commands.show_job(self.job_id, local=True))
        if job.code != 0:
            report(f"the next start may get {suspects[-1]} again: Slurm does not say which nodes the job excludes")
            return ""
        excluded = _fields(job.out).get("ExcNodeList", "(null)").replace("(null)", "")
        already = self.node_names(excluded)
        names = {node.partition(".")[0]: node for node in [*already, *self.node_names(self.nodes)]}
        short = [host.partition(".")[0] for host in suspects]
        bad = [names[host] for host in dict.fromkeys(short) if host in names]
        users = [node for node in already if node not in bad]
        for first in range(max(0, len(bad) - MOST_SUSPECTS), len(bad)):
            nodes = ",".join([*users, *bad[first:]])
            answer = self._ask(slurm_commands.check_submission("--exclude=" + nodes, self._script))
            message = _one_line(answer.err or answer.out)
            # Without an answer the job may be impossible without these nodes, and would wait for ever.
            if answer.code != 0 and slurm_commands.has_no_answer(answer.code, message):
                report(f"the next start may get {bad[-1]} again: Slurm does not answer {message}")
                return ""
            if answer.code == 0:
                report(f"the next start does without {nodes}")
                return nodes
        if bad:
            report(f"too few nodes without {bad[-1]}: the next start may get it again")
        return ""

    def _show(self) -> Dict[str, str]:
        """Fields of ``scontrol show job``; empty without an answer."""
        return _fields(self._call(slurm_commands.show_job(self.job_id, local=True)).out)

    def _ask(self, argv: List[str]) -> Result:
        """The answer of a command that may run twice: asked again while the controller does not answer."""
        give_up = self._monotonic() + _PATIENCE_S
        while True:
            answer = self._call(argv)
            is_away = answer.code != 0 and slurm_commands.has_no_answer(answer.code, answer.err or answer.out)
            if not is_away or self._monotonic() > give_up:
                return answer
            self._sleep(_RETRY_S)

    def _call(self, argv: List[str]) -> Result:
        return self._run(argv, self._env)


def report(message: str) -> None:
    """Write ``message`` into the job's log."""
    print("hpcjobs: " + message, file=sys.stderr, flush=True)


def _epoch(text: Optional[str]) -> Optional[float]:
    return float(text) if text is not None and text.isdigit() and int(text) > 0 else None


def _fields(out: str) -> Dict[str, str]:
    """Fields of one job in the output of ``scontrol show job``.

    The first field of a name counts: the comments of users and sites, at the end, may hold NAME=VALUE too.
    """
    return dict(reversed(re.findall(r"(?:^|\s)([A-Za-z]+)=(\S*)", out)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _log_path() -> str:
    """The file that this job's output goes to."""
    try:
        path = os.readlink("/proc/self/fd/1")
    except OSError:
        return ""
    return path if path.startswith("/") else ""
