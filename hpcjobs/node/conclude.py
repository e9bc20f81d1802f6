"""Concludes an attempt: its cause, its line in the history, the state file, and the next start.

A start of a job that has ended, which Slurm sometimes causes, only reports the job's exit code.
"""

import argparse
import contextlib
import os
import signal
import time
from subprocess import TimeoutExpired
from typing import Dict, Iterable, List, NamedTuple, Optional

from hpcjobs.node import decide
from hpcjobs.node.schedulers import RESUBMITTED, NodeSideScheduler, RestartOutcome, report
from hpcjobs.node.step import JobLog
from hpcjobs.processes import start
from hpcjobs.record import STATE, SUBMITTED
from hpcjobs.record.control import REQUEUE_CODE, ControlDir, Running
from hpcjobs.record.state import (
    Attempt,
    History,
    State,
    StateFile,
    append_attempt,
    count_unrecorded,
    find_recorded,
    read_history,
    read_state_file,
    replace_last,
    write_state,
)
from hpcjobs.record.values import read_json
from hpcjobs.scheduler_kind import KINDS
from hpcjobs.slurm_commands import REQUESTED_FOR


class Options(NamedTuple):
    """Options of the job, and the command that runs one attempt."""

    run_dir: str
    scheduler: str
    """``slurm`` or ``local``."""
    budgets: Dict[str, int]
    """Cause -> how often it may end an attempt without ending the job."""
    warning_s: int
    """How long before the limit Slurm itself signals, and the program hears of it until it has measured better."""
    signal_before_s: Optional[int]
    """How long before the limit the user wants the signal; None: as the program measures."""
    tasks: int
    """Tasks of the job's only step; 0: several steps, and their ends are not the end of the job."""
    agents: bool
    """The tasks are elastic agents, which start ranks again."""
    may_shrink: bool
    """Nodes may fail while the rest continues."""
    nodes: str
    """Hosts of a job without a scheduler that names them; empty: it says, or this host."""
    held: bool
    """The user submitted the job held, and released it once."""
    notify: List[str]
    """The command that reports the end, without its last arguments STATE and EXIT_CODE; empty: no report."""
    command: List[str]
    argv: List[str]
    """The unparsed options."""


def parse(argv: List[str]) -> Options:
    """The options in ``argv``; the command follows ``--``."""
    parser = argparse.ArgumentParser(prog="node.pyz attempts")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--scheduler", choices=tuple(KINDS), required=True)
    parser.add_argument("--budgets", type=_budgets, required=True, help="timeout=N,preempt=N,node=N,error=N")
    parser.add_argument("--warning", type=int, required=True, metavar="S")
    parser.add_argument("--signal-before", type=int, metavar="S")
    parser.add_argument("--tasks", type=int, default=0)
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--may-shrink", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--notify", action="append", default=[], metavar="WORD")
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args(argv)
    return Options(
        run_dir=arguments.run_dir,
        scheduler=arguments.scheduler,
        budgets=arguments.budgets,
        warning_s=arguments.warning,
        signal_before_s=arguments.signal_before,
        tasks=arguments.tasks,
        agents=arguments.agents,
        may_shrink=arguments.may_shrink,
        nodes=arguments.nodes,
        held=arguments.held,
        notify=arguments.notify,
        command=arguments.command,
        argv=argv,
    )


def _budgets(text: str) -> Dict[str, int]:
    return {name: int(count) for name, count in (pair.split("=") for pair in text.split(","))}


NOTIFY_S = 120.0
CANCELLED_CODE = 143
"""128 + SIGTERM: of a job that its scheduler takes away."""
REQUEUE_AFTER_CANCEL_S = 300.0
"""Until a job that requeued itself as it was cancelled is in the queue again, with the difference of two clocks."""


class CurrentAttempt:
    """The attempt that this process looks after, as it starts and as it ends."""

    def __init__(
        self, options: Options, scheduler: NodeSideScheduler, *, job_id: str, nodes: str, started: int
    ) -> None:
        self.options, self.scheduler, self.control = options, scheduler, ControlDir(options.run_dir)
        self.job_id, self.nodes, self.started = job_id, nodes, started
        self.log = JobLog()
        self._reported = ""  # a cancellation is written twice: ahead of SIGKILL, and at the end if that is reached
        self.is_over = False
        """Whether its end is the job's end: the scheduler knows only the exit code."""

    @property
    def is_superseded(self) -> bool:
        """Whether a later attempt has begun: Slurm took this one's node for dead, and started the job elsewhere.

        The later attempt may have ended by now: it recorded the end of this one.
        """
        newest = self.control.running()
        if newest is not None:
            return (newest.host, newest.pid) != (os.uname().nodename, os.getpid())
        try:
            attempts = read_history(self.options.run_dir).attempts
        except OSError:
            return False  # the decision meets the same error, and reports it
        own = (self.scheduler.job_id, self.started, self.scheduler.restarts)
        return any(each.key == own for each in attempts)

    def write_state(self, state: str, code: Optional[int] = None, ended: Optional[int] = None) -> None:
        """Write ``state.json``; that it cannot be written must not end a job."""
        failure = self.control.first_failure if code else None
        state_file = StateFile(
            job_id=self.job_id,
            state=State(state),
            exit_code=code,
            started=self.started,
            ended=ended,
            nodes=self.nodes,
            restarts=self.scheduler.restarts,
            first_failure=failure,
            cluster=os.environ.get("SLURM_CLUSTER_NAME"),
            array_job_id=self.scheduler.array_job_id,
        )
        try:
            write_state(self.options.run_dir, state_file)
        except OSError as error:
            report(f"state.json cannot be written: {error.strerror}")
        if ended is not None and self.options.notify and state != self._reported:
            self._reported = state
            self._notify(state, code)

    def write_earlier_end(self, code: int, ended: int) -> None:
        """Write the end of an earlier start with the times of this one, which identify its record in the accounting.

        It is reported only where the earlier start was killed before it wrote its end.
        """
        state = "FAILED" if code else "COMPLETED"
        with contextlib.suppress(OSError, ValueError):  # then no end was written, or reported
            self._reported = read_state_file(os.path.join(self.options.run_dir, STATE)).state.value
        self.write_state(state, code, ended)

    def _notify(self, state: str, code: Optional[int]) -> None:
        """Report the end to the user; that this cannot be done must not end a job."""
        argv = [*self.options.notify, state, "null" if code is None else str(code)]
        environ = dict(os.environ, HPCJOBS_JOB_ID=self.scheduler.job_id, HPCJOBS_RUN_DIR=self.options.run_dir)
        try:
            start.run(argv, env=environ, timeout_s=NOTIFY_S, show_errors=True, errors="replace")
        except OSError as error:
            report(f"notify: {argv[0]}: {error.strerror}")
        except TimeoutExpired:
            report(f"notify: not done within {NOTIFY_S:.0f} s")

    def judge_earlier(self, running: Running) -> str:
        """Record the attempt before this one, if it left no line; its decision."""
        recorded = self.find_recorded(running)
        if recorded is not None:
            return recorded.decision
        cause = self.scheduler.read_earlier_cause(running.job_id)
        decision = self._decide(cause, earlier=True)
        decision = "requeued by Slurm" if decision == decide.CONTINUES else decision
        self._record(Attempt(running.job_id, running.started, None, running.nodes, None, cause,
                                 self.control.steps, self.control.saved, decision, running.restarts))  # fmt: skip
        return decision

    def record_continuation(self, history: History) -> None:
        """Record that this job continues another one, if the process of that one was killed before it did."""
        last = history.attempts[-1] if history.attempts else None
        if last is None or last.job_id == self.scheduler.job_id:
            return
        try:
            if self.control.continued != self.scheduler.job_id:
                self.control.write_continued(self.scheduler.job_id, self.scheduler.read_queued_at())
            if not last.decision.startswith(RESUBMITTED):
                replace_last(self.options.run_dir, last._replace(decision=f"{RESUBMITTED} {self.scheduler.job_id}"))
        except OSError as error:
            report(f"{error.filename} cannot be written: {error.strerror}")

    def conclude(self, end: decide.AttemptEnd, ended: int) -> int:
        """Decide about another attempt after ``end`` and carry it out; return the job's exit code."""
        self.nodes = self.control.chosen_nodes or self.nodes
        cause = decide.find_cause(end)
        if cause is None:
            if end.scheduler_cause == decide.REQUEUED:
                self.write_state("REQUEUED", CANCELLED_CODE, ended)
            else:
                self.end_cancelled(ended)
            self._release(cancelled=end.scheduler_cause == decide.CANCELLED)
            return CANCELLED_CODE
        if cause == decide.NODE:
            self._suspect_silent_nodes()
            if end.gpu_fault:
                self._suspect_first_failure()
        decision = self._decide(cause, end=end)
        attempt = Attempt(self.scheduler.job_id, self.started, ended, self.nodes, end.exit_code, cause,
                              self.control.steps, self.control.saved, decision, self.scheduler.restarts)  # fmt: skip
        is_recorded = self._record(attempt)
        return self.carry_out(attempt, ended, is_recorded=is_recorded)

    def carry_out(self, attempt: Attempt, ended: int, *, is_recorded: bool = True) -> int:
        """Carry out the decision of ``attempt``, the last of the history if it is recorded; the job's exit code."""
        decision = attempt.decision
        if decision == decide.COMPLETED:
            self.is_over = True
            self.write_state("COMPLETED", 0, ended)
            return 0
        # Exit code 0 would make Slurm call a job completed that is not.
        code = attempt.exit_code or REQUEUE_CODE
        if decision == decide.CONTINUES:
            self.write_state("REQUEUED", code, ended)  # before Slurm ends this process in the course of it
            decision = self._start_again(attempt, is_recorded=is_recorded)
        if decision == decide.WAS_CANCELLED:
            self.end_cancelled(ended)
        elif decision.startswith("ended"):
            self.is_over = True
            self.write_state("FAILED", code, ended)
        return code

    def was_cancelled(self) -> bool:
        """Whether this start was requested before the job was cancelled, and Slurm took it up after that."""
        cancelled_at = self.control.cancelled_at
        if cancelled_at is None:
            return False
        queued_at = self.scheduler.read_queued_at()
        return queued_at is None or abs(queued_at - cancelled_at) <= REQUEUE_AFTER_CANCEL_S

    def end_cancelled(self, ended: int) -> None:
        """Write that the job was cancelled; a start that its user requests later runs."""
        self.write_state("CANCELLED", CANCELLED_CODE, ended)
        try:
            self.control.clear_cancelled()
        except OSError as error:
            report(f"{error.filename} cannot be removed, and a start within minutes would end: {error.strerror}")

    def find_recorded(self, running: Running) -> Optional[Attempt]:
        """The line of ``running``, if its process was killed after writing it; None: not written."""
        try:
            return find_recorded(read_history(self.options.run_dir), running.key)
        except OSError:
            return None  # the decision meets the same error, and reports it

    def _release(self, *, cancelled: bool) -> None:
        """Leave the attempt to the scheduler, which ends the job for good or starts it again."""
        try:
            if cancelled:
                self.control.clear_running()
            else:
                self.control.leave_to_scheduler()
        except OSError as error:
            report(f"{self.control.path} cannot be written: {error.strerror}")

    def _suspect_silent_nodes(self) -> None:
        """Suspect nodes that failed to start the step: srun names them, or they are silent.

        A silent node started no task although other nodes did. If no task started at all, the first node is not the
        reason, because it runs this process; among several other nodes the reason is unknown.
        """
        if self.options.tasks == 0 or self.options.agents:
            return
        nodes, started = self.scheduler.node_names(self.nodes), self.control.started_hosts()
        suspects = set(self.log.failed_launches()) & set(nodes)
        if not suspects:
            suspects = set(nodes) - set(started or nodes[:1])
            if not started and len(suspects) > 1:
                return
        self._add_suspects(suspects)

    def _suspect_first_failure(self) -> None:
        failure = self.control.first_failure
        if failure is not None:
            self._add_suspects([failure.host])

    def _add_suspects(self, hosts: Iterable[str]) -> None:
        try:
            for host in hosts:
                self.control.add_suspect(host)
        except OSError as error:
            report(f"the suspects cannot be written: {error.strerror}")

    def _decide(self, cause: str, *, earlier: bool = False, end: Optional[decide.AttemptEnd] = None) -> str:
        """The decision by the history; a history that cannot be read ends the job, and spends no budget."""
        try:
            history = read_history(self.options.run_dir)
        except OSError as error:
            return f"ended: {error.filename} cannot be read: {error.strerror}"
        # The scheduler counts this start too, which an earlier attempt did not have before it.
        restarts = self.scheduler.restarts - int(earlier)
        unrecorded = count_unrecorded(history, self.scheduler.job_id, restarts)
        return decide.decide(
            cause,
            saved=self.control.saved,
            history=history,
            budgets=self.options.budgets,
            unrecorded=unrecorded,
            exit_code=None if end is None else end.exit_code,
            wrong_configuration=None if end is None else end.wrong_configuration,
        )

    def _record(self, attempt: Attempt) -> bool:
        """Append the attempt to the history; False: it lacks this attempt."""
        number, is_recorded = self.scheduler.restarts + 1, False
        try:
            append_attempt(self.options.run_dir, attempt)
            is_recorded = True
            number = len(read_history(self.options.run_dir).attempts)
        except OSError as error:
            problem = "cannot be read" if is_recorded else "lacks this attempt"
            report(f"attempts.jsonl {problem}: {error.strerror}")
        # Also without a line: the next start would take this attempt for one that Slurm requeued, and count that.
        with contextlib.suppress(OSError):
            self.control.clear_running()
        report(
            f"attempt {number}: {attempt.cause} at step {attempt.steps}, "
            f"saved up to {attempt.saved}; {attempt.decision}"
        )
        return is_recorded

    def _start_again(self, attempt: Attempt, *, is_recorded: bool) -> str:
        """Start the next attempt; what became of it.

        Only Slurm's restart count has an attempt that is not recorded, and another job begins again at 0: nothing
        would bound the jobs that continue each other. Nor does another job continue one whose user cancelled it: Slurm
        has forgotten that where this attempt ran on after Slurm gave up its node.
        """
        is_cancelled = self.control.cancelled_at is not None
        continuation = self.scheduler.start_again(
            self.control.suspects(), as_another_job=is_recorded and not is_cancelled
        )
        if is_cancelled and continuation.decision != decide.CONTINUES:
            continuation = RestartOutcome(decide.WAS_CANCELLED)
        if continuation.decision == decide.CONTINUES:
            if not is_recorded:
                report("the attempt that attempts.jsonl lacks counts for every budget: Slurm counts its restart")
            return continuation.decision
        if not is_recorded:  # the last line is an earlier attempt's
            report(f"not requeued: {continuation.decision}")
            if continuation.decision != decide.WAS_CANCELLED:
                report(
                    "no other job continues this one, because attempts.jsonl lacks this attempt: no budget counts it"
                )
            return continuation.decision
        try:
            if continuation.job_id is not None:
                # Before the history: of two continuations, after a lost answer, the other one ends by it.
                self.control.write_continued(continuation.job_id)
                report(f"requeue is not allowed here; continues as job {continuation.job_id}")
            else:
                report(f"not requeued: {continuation.decision}")
            replace_last(self.options.run_dir, attempt._replace(decision=continuation.decision))
        except OSError as error:
            report(f"attempts.jsonl cannot be corrected: {error.strerror}")
        return continuation.decision


REQUEUE_AT_END_S = 15.0
"""So late after a job's end a busy slurmctld requeues it by itself."""


def code_of_finished(job: CurrentAttempt, history: History) -> Optional[int]:
    """The exit code of a start of an ended job; None: the job has not ended.

    Slurm may start a job again that has ended: when slurmstepd was killed, or when it was preempted with grace
    before and requeued itself, for Slurm 24.11 then requeues it once more as it ends. And a job that was submitted
    twice to continue another one, because the answer of sbatch was lost, must not run twice.
    """
    if is_late_copy(job):
        report("the request of this job came late, and another job was submitted in its place: nothing is left to do")
        return 0
    other = job.control.continued
    if other not in ("", job.scheduler.job_id) and all(attempt.job_id != other for attempt in history.attempts):
        report(f"job {other} continues in this run folder: nothing is left to do")
        return 0
    last = history.attempts[-1] if history.attempts else None
    code = job.control.finished_code(job.scheduler.job_id)
    if code is not None:
        try:
            job.control.clear_finished()
        except OSError as error:
            report(f"{error.filename} cannot be removed, and a later start would end at once too: {error.strerror}")
    elif last is not None and last.job_id == job.scheduler.job_id:
        if last.decision == decide.COMPLETED:
            code = 0
        elif last.decision.startswith(RESUBMITTED):
            code = REQUEUE_CODE
        elif last.decision.startswith("ended") and requeued_by_slurm(job, history):
            code = last.exit_code or REQUEUE_CODE
    if code is not None:
        if last is None or not last.decision.startswith(RESUBMITTED):  # a resubmitted job owns the folder now
            job.write_earlier_end(code, int(time.time()))
        report(f"this job has ended: nothing is left to do ({last.decision if last else code})")
    return code


class RecordedJob(NamedTuple):
    """What counts here of ``submitted.json``."""

    job_id: str


def is_late_copy(job: CurrentAttempt) -> bool:
    """Whether Slurm took this request up after the one that hpcjobs sent in its place, and recorded.

    A job that cannot be requeued may have taken it for the one that continues it.
    """
    folder, own = os.environ.get(REQUESTED_FOR, ""), job.scheduler.array_job_id or job.scheduler.job_id
    if folder not in (job.options.run_dir, os.path.dirname(job.options.run_dir)) or job.scheduler.restarts:
        return False
    try:
        return own not in (read_json(os.path.join(folder, SUBMITTED), RecordedJob).job_id, job.control.continued)
    except (OSError, ValueError):  # not recorded yet, or never
        return False


def requeued_by_slurm(job: CurrentAttempt, history: History) -> bool:
    """Whether Slurm started this ended job again for an old preemption's sake, and not its user.

    Slurm does so at the job's end; a user who requeues a job that failed needs longer to see that it did.
    """
    own = [attempt for attempt in history.attempts if attempt.job_id == job.scheduler.job_id]
    ended = own[-1].ended
    if ended is None or not any(attempt.cause == decide.PREEMPT for attempt in own[:-1]):
        return False
    queued_at = job.scheduler.read_queued_at()
    return queued_at is not None and queued_at - ended <= REQUEUE_AT_END_S


def leave_orphaned(job: CurrentAttempt, code: int) -> None:
    """Requeue a job after its slurmstepd died: one more short start reports the end to Slurm."""
    report(f"slurmstepd of this job died: one more start reports exit code {code} to Slurm")
    # The requeue ends this process, and the start that follows reads the code: so it is written before.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job.control.write_finished(job.scheduler.job_id, code)
    outcome = job.scheduler.start_again([], as_another_job=False)
    if outcome.decision != decide.CONTINUES:
        report(f"Slurm does not learn the exit code: {outcome.decision}")
