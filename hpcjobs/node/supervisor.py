"""One attempt of a job from its start to the decision about the next one: the process that the job script becomes.

If that process was killed, the wrapper of rank 0 decides: Slurm gives it some seconds. Slurm ends a job when its batch
script ends for any reason: the ranks get SIGTERM, save, and leave.
"""

import math
import os
import signal
import sys
import time
from subprocess import Popen
from typing import Dict, Optional

from hpcjobs.node import decide, step
from hpcjobs.node.conclude import CANCELLED_CODE, CurrentAttempt, Options, code_of_finished, leave_orphaned, parse
from hpcjobs.node.schedulers import Clock, Local, NodeSideScheduler, Slurm, report, run, signal_time_s
from hpcjobs.processes import tree
from hpcjobs.processes.fork import SignalPipe, adopt_orphans
from hpcjobs.processes.start import start
from hpcjobs.processes.tree import is_alive
from hpcjobs.record.control import ControlDir, Running
from hpcjobs.record.state import History, read_history
from hpcjobs.scheduler_kind import KINDS

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
LOOK_S = 5.0
"""Between two looks at the tasks' ends."""
LIMIT_LOOK_S = 300.0
"""Between two questions for the time limit, which administrators extend and shorten."""
WARNING_MARGIN_S = 65.0
"""Slurm's signal ahead of the limit comes up to a minute early."""
SAVE_GRACE_S = 60.0
"""For ranks to save and leave when the script that started them was killed; later signals follow at a third of it."""
READ_PATIENCE_S = 300.0
"""Seconds to wait for an unreadable history, as while a file server restarts, before the job is held."""
BEFORE_KILL_S = 4.0
"""Seconds before Slurm's SIGKILL at which a cancellation is recorded, if SIGTERM comes that long before it."""
PAST_LIMIT_S = 2.0
"""Until the limit, from when on an end counts as the limit's."""
KILLED_CODE = 137


class Supervisor:
    """Runs the script of one attempt, signals it ahead of the limit, and collects the facts about its end."""

    def __init__(self, job: CurrentAttempt, clock: Clock, signals: SignalPipe, script: "Popen[bytes]") -> None:
        self.job, self.clock, self.signals, self.script = job, clock, signals, script
        options = job.options
        self.watch = step.StepWatch(options.tasks, time.monotonic, agents=options.agents, may_shrink=options.may_shrink)
        self.signalled: Optional[str] = None
        self.terminated = False
        self.step_ended_by_us: Optional[str] = None
        self.cause_at_term: Optional[str] = None
        self._record_cancelled_at = math.inf
        self._limit_read = time.monotonic()
        self._next_launcher_signal = (signal.SIGTERM, 0.0)
        self._signal_before_s = self.signal_before_s

    def run(self) -> decide.AttemptEnd:
        """Wait until the script has ended; the facts about its end."""
        while self.script.poll() is None:
            self._handle_signals(self._patience_s())
            self._check_time()
            self._check_step()
            self._check_kill()
        if self.script.returncode < 0:
            self._end_orphans()
        self._handle_signals(0.0)  # SIGTERM may have come, and ended the script, during a command of Slurm
        return self._end()

    def _patience_s(self) -> float:
        is_due = self.signalled is None and not self.terminated  # as `_check_time` has it
        left = self.clock.left_s - self._signal_before_s if is_due else math.inf
        return min(LOOK_S, max(0.0, left), max(0.0, self._record_cancelled_at - time.monotonic()))

    @property
    def signal_before_s(self) -> float:
        return signal_time_s(
            fixed_s=self.job.options.signal_before_s,
            measured_s=self.job.control.signal_before_s,
            total_s=self.clock.total_s,
            warning_s=self.job.options.warning_s,
        )

    # --- signals

    def _handle_signals(self, timeout_s: float) -> None:
        """Wait for signals for at most ``timeout_s``, and act on those that came."""
        for number in self.signals.wait(timeout_s):
            if number == signal.SIGUSR1:
                self._on_warning()
            elif number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                self._on_term()

    def _on_term(self) -> None:
        if not self.terminated:
            self.terminated = True
            terminated_at = time.monotonic()
            # Before the question: its answer may take longer than Slurm waits before SIGKILL.
            self.script.send_signal(signal.SIGTERM)
            self.cause_at_term = self.job.scheduler.read_cause()  # later the job has left the queue
            if self.cause_at_term == decide.CANCELLED:
                kill_wait_s = self.job.scheduler.read_kill_wait_s()
                self._record_cancelled_at = terminated_at + max(kill_wait_s - BEFORE_KILL_S, kill_wait_s / 2)

    def _check_kill(self) -> None:
        """Record the cancellation before Slurm's SIGKILL, where the launcher outlasts the time until it."""
        if time.monotonic() >= self._record_cancelled_at:
            self._record_cancelled_at = math.inf
            if not self.job.is_superseded:
                self.job.end_cancelled(int(time.time()))

    def _on_warning(self) -> None:
        """Slurm's signal to the script: ahead of the limit, or ahead of a preemption."""
        self._read_limit()
        left = self.clock.left_s
        if left <= self.signal_before_s:
            self._signal_step(decide.TIMEOUT)
        elif left > self.job.options.warning_s + WARNING_MARGIN_S:
            self._signal_step(decide.PREEMPT)
        # Otherwise the limit is near, and this process's own clock signals in time.

    def _check_time(self) -> None:
        if self.signalled is not None or self.terminated:
            return
        self._signal_before_s = self.signal_before_s
        due = self.clock.left_s <= self._signal_before_s
        if due or time.monotonic() - self._limit_read >= LIMIT_LOOK_S:
            self._read_limit()
        if due and self.clock.left_s <= self._signal_before_s:
            self._signal_step(decide.TIMEOUT)

    def _signal_step(self, cause: str) -> None:
        if self.signalled is None:
            self.signalled = cause
            self.script.send_signal(signal.SIGUSR1)

    def _read_limit(self) -> None:
        self._limit_read = time.monotonic()
        self.clock.update(self.job.scheduler.read_limit())
        publish_deadline(self.job, self.clock)

    # --- the step

    def _check_step(self) -> None:
        if self.step_ended_by_us is None:
            problem = self.watch.problem(self.job.control.ends(), lambda: bool(step.rank_processes(self.job.job_id)))
            if problem is None or self.script.poll() is not None:
                return
            report(f"{problem}, and the launcher waits: it is ended")
            self.step_ended_by_us = problem
            self._next_launcher_signal = (signal.SIGTERM, time.monotonic())
        number, when = self._next_launcher_signal
        if time.monotonic() >= when:
            tree.send(tree.children(self.script.pid), number)
            self._next_launcher_signal = (signal.SIGKILL, time.monotonic() + SAVE_GRACE_S / 3)

    def _end_orphans(self) -> None:
        """The script was killed: let the ranks of the launcher that it left behind save, then end it."""
        report(f"the job script was killed by signal {-self.script.returncode}")
        for number, grace_s in (
            (signal.SIGUSR1, SAVE_GRACE_S),
            (signal.SIGTERM, SAVE_GRACE_S / 3),
            (signal.SIGKILL, SAVE_GRACE_S / 3),
        ):
            orphans = tree.children(os.getpid())
            tree.send(orphans, number)
            give_up = time.monotonic() + grace_s
            while tree.reap() and not set(orphans).isdisjoint(tree.children(os.getpid())):
                if time.monotonic() > give_up:
                    break
                self._handle_signals(min(1.0, give_up - time.monotonic()))

    # --- the end

    def _end(self) -> decide.AttemptEnd:
        control, options = self.job.control, self.job.options
        code, completed, cause = self._exit_code(), control.completed, self.cause_at_term
        if options.may_shrink and completed:
            code = 0  # tasks of nodes that failed count for srun
        is_done = code == 0 and completed
        if not is_done and not self.terminated:
            # Slurm signals the ranks too, and they may end before its signal reaches this process.
            cause = self.job.scheduler.read_cause()
        if code == 0 and not completed and not self.terminated:
            # A script with several steps, or with none that is a rank, has no rank 0 that could tell its end.
            no_ranks = options.tasks == 0 or not (options.agents or control.ends() or control.started_hosts())
            completed = no_ranks and cause in (None, decide.RUNNING)
        failure = control.first_failure
        wrong = self.job.log.find_configuration_error(None if failure is None else failure.rank) if code != 0 else None
        return decide.AttemptEnd(
            exit_code=code,
            asks_to_continue=control.asks_to_continue,
            completed=completed,
            signalled=self.signalled,
            terminated=self.terminated,
            past_limit=self.clock.left_s <= PAST_LIMIT_S,
            scheduler_cause=None if cause == decide.RUNNING else cause,
            gpu_fault=code != 0 and self.job.log.names_gpu_fault(),
            wrong_configuration=None if wrong is None else wrong.text,
        )

    def _exit_code(self) -> int:
        """The exit code of the tasks if they wrote it, otherwise of the script.

        A code that the script has from elsewhere than its step, from its last lines say, remains.
        """
        control, tasks = self.job.control, self.job.options.tasks
        returned, ends, failure = self.script.returncode, control.ends(), control.first_failure
        code = returned if returned >= 0 else 128 - returned  # after a signal, as a shell does
        from_step = returned < 0 or self.step_ended_by_us is not None or code == control.step_code
        if not from_step:
            return code
        if tasks > 0 and all(task in ends for task in range(tasks)):
            code = step.code_of(ends)
        elif self.job.log.failed_launches():
            return KILLED_CODE  # srun's own code is a part of its error number
        elif self.step_ended_by_us is not None:
            code = KILLED_CODE
        return failure.exit_code if failure is not None and code != 0 else code


def supervise(options: Options) -> int:
    """Run ``options.command`` as one attempt of this job and decide about another one; return the job's exit code."""
    environ = dict(os.environ)
    # First: a signal that comes before the script is started waits, and ends no process without a record.
    signals = SignalPipe(*HANDLED)
    scheduler, kind = connect(options, environ), KINDS[options.scheduler]
    job_id = environ.get(kind.id_variable or "HPCJOBS_JOB_ID", "")
    nodes = options.nodes or environ.get("SLURM_JOB_NODELIST") or os.uname().nodename
    job = CurrentAttempt(options, scheduler, job_id=job_id, nodes=nodes, started=int(time.time()))
    history = wait_for_history(job, signals)
    if history is None:
        report(scheduler.hold())
        return 1
    code = code_of_finished(job, history)
    if code is not None:
        return code
    job.record_continuation(history)
    if job.was_cancelled():
        report("this job was cancelled as it started itself again: nothing is left to do")
        scheduler.cancel()
        job.end_cancelled(int(time.time()))
        return CANCELLED_CODE
    earlier = job.control.running()
    if earlier is not None and kind.may_requeue:
        decision = job.judge_earlier(earlier)
        if decision.startswith("ended"):
            report(decision)
            job.write_state("FAILED", 1, int(time.time()))
            return 1
    try:
        # Before the script: a start that is killed from here on is judged by the next one, or by rank 0.
        job.control.prepare(
            Running(
                scheduler.job_id, job.started, nodes, os.uname().nodename, os.getpid(), options.argv, scheduler.restarts
            )
        )
        job.control.write_aftermath([sys.executable, "-I", os.path.abspath(sys.argv[0]), "aftermath", job.control.path])
    except OSError as error:
        report(f"{job.control.path} cannot be written: {error.strerror}")
        report(scheduler.hold())
        return 1
    job.write_state("RUNNING")
    parent = os.getppid()
    adopt_orphans()  # signals reach ranks also after their launcher was killed
    clock = Clock(time.monotonic, scheduler.read_limit())
    publish_deadline(job, clock)
    script = start(options.command, env=script_environ(job, environ, clock), stdin=None)
    end = Supervisor(job, clock, signals, script).run()
    if job.is_superseded:  # the state, the history and the control directory are the later attempt's
        report("a later attempt of this job has begun: this one ends without a record")
        return end.exit_code or CANCELLED_CODE
    code = job.conclude(end, int(time.time()))
    # Another parent: slurmstepd was killed, and cannot report the exit code to Slurm.
    if kind.has_nodes and job.is_over and os.getppid() != parent:
        leave_orphaned(job, code)
    return code


def connect(options: Options, environ: Dict[str, str]) -> NodeSideScheduler:
    if KINDS[options.scheduler].id_variable is None:
        return Local(environ)
    return Slurm(environ, run, job_script=os.path.join(options.run_dir, "job.sh"), held=options.held)


def wait_for_history(
    job: CurrentAttempt, signals: SignalPipe, patience_s: float = READ_PATIENCE_S
) -> Optional[History]:
    """The history, also of a folder that comes back within ``patience_s``; None: it cannot be read."""
    give_up, reported = time.monotonic() + patience_s, False
    while True:
        try:
            job.control.check_readable()
            return read_history(job.options.run_dir)
        except OSError as error:
            if not reported:
                report(f"{error.filename}: {error.strerror}; waiting for it")
            reported = True
        if time.monotonic() > give_up or signal.SIGTERM in signals.wait(LOOK_S):
            return None


def publish_deadline(job: CurrentAttempt, clock: Clock) -> None:
    """Write the time limit for the program; on a full disk the program keeps the limit it read before."""
    try:
        job.control.write_deadline(time.time() + clock.left_s)
    except OSError as error:
        report(f"the time limit cannot be written for the program: {error.strerror}")


def script_environ(job: CurrentAttempt, environ: Dict[str, str], clock: Clock) -> Dict[str, str]:
    """The environment of the script and its program."""
    added = {"HPCJOBS_CONTROL_DIR": job.control.path, "HPCJOBS_ATTEMPTS_PID": str(os.getpid())}
    if clock.left_s < math.inf:
        added["HPCJOBS_DEADLINE"] = f"{time.time() + clock.left_s:.0f}"
    return dict(environ, **added)


def conclude_killed(control_dir: str) -> int:
    """Decide about the attempt that ``control_dir`` has running, if its process was killed; exit code 0."""
    running = ControlDir(os.path.dirname(control_dir)).running()
    if running is None or running.pid == 0 or running.host != os.uname().nodename:
        return 0
    if is_alive(running.pid):
        return 0
    options = parse(running.argv)
    scheduler = connect(options, dict(os.environ))
    cause = scheduler.read_cause()
    if cause == decide.REQUEUED:
        return 0
    report(f"the process that decides about this job, {running.pid}, was killed: rank 0 decides")
    job = CurrentAttempt(
        options, scheduler, job_id=os.environ.get("SLURM_JOB_ID", ""), nodes=running.nodes, started=running.started
    )
    recorded = job.find_recorded(running)
    if recorded is not None:
        job.carry_out(recorded, int(time.time()))
        return 0
    cause = cause if cause == decide.CANCELLED else decide.NODE
    job.conclude(decide.AttemptEnd(KILLED_CODE, scheduler_cause=cause), int(time.time()))
    return 0
