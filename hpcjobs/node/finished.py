"""Handles starts of a job that has ended, which Slurm sometimes causes: they only report the job's exit code."""

import signal
import time
from typing import Optional

from hpcjobs.node import decide
from hpcjobs.node.conclude import CurrentAttempt
from hpcjobs.node.schedulers import RESUBMITTED
from hpcjobs.node.slurm import report
from hpcjobs.record.attempts import History
from hpcjobs.record.control import REQUEUE_CODE

REQUEUE_AT_END_S = 15.0
"""So late after a job's end a busy slurmctld requeues it by itself."""


def code_of_finished(job: CurrentAttempt, history: History) -> Optional[int]:
    """The exit code of a start that has nothing to do; None: it has.

    Slurm may start a job again that has ended: when slurmstepd was killed, or when it was preempted with grace
    before and requeued itself, for Slurm 24.11 then requeues it once more as it ends. And a job that was submitted
    twice to continue another one, because the answer of sbatch was lost, must not run beside the one that does.
    """
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
        if last is None or not last.decision.startswith(RESUBMITTED):  # else the folder is another job's now
            job.write_earlier_end(code, int(time.time()))
        report(f"this job has ended: nothing is left to do ({last.decision if last else code})")
    return code


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
    """Requeue a job whose slurmstepd died: one more short start reports its end to Slurm."""
    report(f"slurmstepd of this job died: one more start reports exit code {code} to Slurm")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job.control.write_finished(job.scheduler.job_id, code)
    job.scheduler.start_again([])
