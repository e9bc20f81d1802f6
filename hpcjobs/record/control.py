"""The control directory: files that the program and ``node.pyz`` exchange."""

import os
import shlex
from typing import Dict, List, NamedTuple, Optional, Tuple

from hpcjobs.files import append_lines, write_beside
from hpcjobs.record import CONTROL, FIRST_FAILURE
from hpcjobs.record.state import FirstFailure, read_first_failure
from hpcjobs.record.values import decode, encode, read_count, read_text, remove

PROGRESS, STEPS, REQUEUE, SIGNAL_BEFORE = "progress", "steps", "requeue", "signal-before"
"""Numbers that the program writes."""
SUSPECTS, DEADLINE = "suspects", "deadline"
REQUEUE_CODE = 85
"""Exit code of a task that has saved and asks to be started again."""


class Running(NamedTuple):
    """The attempt that is running: another process reads this if the attempt's own process was killed."""

    job_id: str
    started: int
    nodes: str
    host: str = ""
    pid: int = 0
    argv: List[str] = []
    """Options of the process that decides."""
    restarts: int = 0
    """How often the scheduler had started the job before."""

    @property
    def key(self) -> Tuple[str, float, int]:
        """`Attempt.key` of its line in the history."""
        return (self.job_id, self.started, self.restarts)


class Continuation(NamedTuple):
    """The scheduler's job that continues another one where requeueing is forbidden."""

    job_id: str
    submitted: float


class ControlDir:
    """``control/`` in the run folder, and ``first_failure``."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir, self.path = run_dir, os.path.join(run_dir, CONTROL)

    def prepare(self, running: Running) -> None:
        """Remove the files of an earlier attempt and record the running one. Raises OSError."""
        for folder in ("ends", "started"):
            os.makedirs(self._file(folder), exist_ok=True)
            for name in os.listdir(self._file(folder)):
                remove(self._file(folder, name))
        for name in (REQUEUE, "completed", "finished", "cancelled", "step_code", "nodes", DEADLINE):
            remove(self._file(name))
        remove(os.path.join(self.run_dir, FIRST_FAILURE))
        write_beside(self._file("running"), encode(running) + "\n")

    def write_aftermath(self, command: List[str]) -> None:
        """Note how rank 0 decides if the process that should was killed. Raises OSError."""
        write_beside(self._file("aftermath"), "exec {}\n".format(" ".join(map(shlex.quote, command))))

    def check_readable(self) -> None:
        """Raises OSError where the run folder is away: renamed, or not mounted."""
        os.listdir(self.run_dir)

    # --- written by the program

    @property
    def asks_to_continue(self) -> bool:
        """Whether all that the program did is saved, and it asks for another attempt."""
        return bool(read_text(self._file(REQUEUE)).strip()) or REQUEUE_CODE in self.ends().values()

    @property
    def completed(self) -> bool:
        """Whether rank 0 ended with code 0."""
        return os.path.exists(self._file("completed"))

    @property
    def saved(self) -> int:
        return self._number(PROGRESS)

    @property
    def steps(self) -> int:
        return max(self._number(STEPS), self.saved)

    @property
    def signal_before_s(self) -> int:
        """Seconds before the time limit at which the program needs its signal, as it measured; 0: not known yet."""
        return self._number(SIGNAL_BEFORE)

    def ends(self) -> Dict[int, int]:
        """Task of the step -> its exit code, of tasks that ended."""
        try:
            names = os.listdir(self._file("ends"))
            ends = [(read_count(name), read_count(read_text(self._file("ends", name)).strip())) for name in names]
        except OSError:
            return {}
        return {task: code for task, code in ends if task is not None and code is not None}

    @property
    def step_code(self) -> Optional[int]:
        """Exit code of the step, as the job script saw it."""
        return read_count(self._read_value("step_code"))

    @property
    def first_failure(self) -> Optional[FirstFailure]:
        return read_first_failure(self.run_dir)

    def suspects(self) -> List[str]:
        """Hosts that the next attempt should not get, each once, the newest last."""
        try:
            named = read_text(self._file(SUSPECTS)).split()
        except OSError:
            return []
        return sorted(set(named), key=lambda host: len(named) - named[::-1].index(host))

    def started_hosts(self) -> List[str]:
        """Nodes where a task of this attempt started."""
        try:
            return os.listdir(self._file("started"))
        except OSError:
            return []

    @property
    def chosen_nodes(self) -> str:
        """Nodes that the preflight check chose; empty: the complete allocation."""
        return self._read_value("nodes")

    # --- written by ``hpcjobs cancel``

    def write_cancelled(self, now: float) -> None:
        """Note that the job is cancelled at ``now``: a requeue that it requests at that moment undoes it in Slurm.

        Raises OSError: it cannot be written, as where the job has not begun.
        """
        write_beside(self._file("cancelled"), f"{now:.0f}\n")

    # --- written by node.pyz

    def running(self) -> Optional[Running]:
        """The attempt that ended without a line in the history, if there is one."""
        try:
            return decode(read_text(self._file("running")).encode(), Running)
        except (OSError, ValueError):
            return None

    def clear_running(self) -> None:
        remove(self._file("running"))

    def leave_to_scheduler(self) -> None:
        """Leave the decision to the scheduler: the next start, if any, records the cause of this end."""
        running = self.running()
        if running is not None:
            write_beside(self._file("running"), encode(running._replace(pid=0)) + "\n")

    @property
    def continued(self) -> str:
        """Id of the job that continues this one, if a job cannot be requeued; empty: no job does."""
        continuation = self.continuation()
        return "" if continuation is None else continuation.job_id

    def continuation(self) -> Optional[Continuation]:
        """The job that continues this one. Without a submission time in the file, the file's own time counts."""
        path = self._file("continued")
        try:
            parts = read_text(path).split()
            return Continuation(parts[0], float(parts[1]) if parts[1:] else os.stat(path).st_mtime) if parts else None
        except (OSError, ValueError):
            return None

    def write_continued(self, job_id: str, submitted: Optional[float] = None) -> None:
        """Name the job that continues this one, with the time of its submission if that was not just now."""
        write_beside(self._file("continued"), job_id + ("\n" if submitted is None else f" {submitted:.0f}\n"))

    def write_deadline(self, deadline: float) -> None:
        """Seconds since 1970, by this host's clock; infinity: no limit, or none known.

        Limits are extended and shortened while a job runs.
        """
        write_beside(self._file(DEADLINE), f"{deadline:.0f}\n")

    def finished_code(self, job_id: str) -> Optional[int]:
        """Exit code of ``job_id`` where it ended, but could not tell Slurm so; None: it did not."""
        recorded, _, code = self._read_value("finished").partition("=")
        return read_count(code) if recorded == job_id else None

    def clear_finished(self) -> None:
        """Remove the code, so that a job that is requeued later runs. Raises OSError."""
        remove(self._file("finished"))

    @property
    def cancelled_at(self) -> Optional[float]:
        """When its user cancelled the job while it ran, and it has not ended since; None: nobody did."""
        return float(self._number("cancelled")) or None

    def clear_cancelled(self) -> None:
        """Remove the note of a cancellation. Raises OSError."""
        remove(self._file("cancelled"))

    def add_suspect(self, host: str) -> None:
        append_lines(self._file(SUSPECTS), [host])

    def write_finished(self, job_id: str, code: int) -> None:
        write_beside(self._file("finished"), f"{job_id}={code}\n")

    def _number(self, name: str) -> int:
        return read_count(self._read_value(name)) or 0

    def _read_value(self, name: str) -> str:
        try:
            return (read_text(self._file(name)).split() or [""])[0]
        except OSError:
            return ""

    def _file(self, *names: str) -> str:
        return os.path.join(self.path, *names)
