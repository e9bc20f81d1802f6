"""Decides why an attempt ended, and whether another one follows. Pure: no files, no commands, no clock."""

from typing import Dict, List, NamedTuple, Optional

from hpcjobs.record.control import REQUEUE_CODE
from hpcjobs.record.state import Attempt, History

COMPLETED, TIMEOUT, PREEMPT, NODE, ERROR = "completed", "timeout", "preempt", "node", "error"
"""Causes of an end."""
RUNNING, CANCELLED, REQUEUED, FAILED = "running", "cancelled", "requeued", "failed"
"""Further answers of the scheduler: the job is not ending, ends for good, starts again, or its script has failed."""
CONTINUES = "requeued"
"""The decision that another attempt follows."""
WAS_CANCELLED = "ended: the job was cancelled"
"""What became of that decision where a cancellation came before it was carried out."""
NODE_CODES = (11, 18, 19, 22, 134, 137)
"""No rendezvous, a rank lost, no progress of all ranks, a broken GPU, SIGABRT, SIGKILL: the node's fault.

Torch's watchdog of NCCL ends a process by SIGABRT when its GPU or its communicator fails.
"""
CONFIGURATION_CODE = 23
"""GPUs, ranks, network interface or versions of NCCL that do not fit: another attempt would meet the same."""
SIGNAL_CODES = (138, 143)
"""SIGUSR1 and SIGTERM: signalled, and the program does not listen."""
PATIENCE = 3
"""Attempts in a row without progress that end the job."""
PATIENCE_AT_LIMIT = 1
"""A complete time limit without anything saved would only be repeated."""


class AttemptEnd(NamedTuple):
    """The facts about the end of an attempt."""

    exit_code: int
    asks_to_continue: bool = False
    """The program has saved, and asks to be started again."""
    completed: bool = False
    """Rank 0 ended with code 0."""
    signalled: Optional[str] = None
    """``timeout`` or ``preempt``: the cause of this process's own signal to the program."""
    terminated: bool = False
    """SIGTERM came: the scheduler takes the job away."""
    past_limit: bool = False
    scheduler_cause: Optional[str] = None
    """Why the scheduler ends the job: a cause, ``running``, ``cancelled`` or ``requeued``; None: it does not answer."""
    gpu_fault: bool = False
    """The log names a GPU with a hardware fault."""
    wrong_configuration: Optional[str] = None
    """The error of GPUs, network interface or versions in the last lines of the rank that failed first."""


def find_cause(end: AttemptEnd) -> Optional[str]:
    """The cause of an end; None: the scheduler takes the job away, and decides about another start."""
    # Completion counts even if the job was cancelled or requeued at the same moment: no work is left.
    if end.exit_code == 0 and end.completed and not end.asks_to_continue:
        return COMPLETED
    # A user cancelled or requeued the job: another requeue would undo that.
    if end.scheduler_cause in (CANCELLED, REQUEUED):
        return None
    asks_to_continue = end.asks_to_continue or end.exit_code == REQUEUE_CODE
    late = end.past_limit or end.scheduler_cause == TIMEOUT
    if asks_to_continue:
        # The program saved because it was signalled. The own signal is certain; the scheduler's cause may come late.
        if end.signalled == TIMEOUT or late:
            return TIMEOUT
        if end.scheduler_cause in (PREEMPT, NODE):
            return end.scheduler_cause
        return None if end.terminated else PREEMPT
    if end.exit_code == 0 or end.terminated:  # Slurm's end of a step gives 0 too
        if late:
            return TIMEOUT
        return end.scheduler_cause if end.scheduler_cause in (PREEMPT, NODE) else None
    # A rank that SIGKILL ended may also be out of memory, but only another node can show that: the budget is bounded.
    if end.exit_code in NODE_CODES:
        return NODE
    if end.exit_code in SIGNAL_CODES:
        return TIMEOUT if end.signalled == TIMEOUT or late else PREEMPT
    return NODE if end.gpu_fault and end.exit_code != CONFIGURATION_CODE else ERROR


def decide(
    cause: str,
    *,
    saved: int,
    history: History,
    budgets: Dict[str, int],
    unrecorded: int = 0,
    exit_code: Optional[int] = None,
    wrong_configuration: Optional[str] = None,
) -> str:
    """``completed``, ``requeued``, or ``ended:`` and the reason.

    Args:
        saved: steps that a next attempt would resume from.
        unrecorded: earlier attempts that the history lacks. They count for every budget: their cause is not known,
            and a budget must not count as unspent because its record is lost.
    """
    if cause == COMPLETED:
        return COMPLETED
    if cause == ERROR and exit_code == CONFIGURATION_CODE:
        return (
            f"ended: code {CONFIGURATION_CODE}, the configuration cannot work, and another attempt would meet the same"
        )
    if cause == ERROR and wrong_configuration is not None:
        return f"ended: the configuration cannot work, and another attempt would meet the same: {wrong_configuration}"
    # A budget per cause: preemptions are frequent and harmless, errors repeat.
    spent = sum(attempt.cause == cause for attempt in history.attempts) + unrecorded
    if spent >= budgets[cause]:
        return f"ended: the budget {cause}={budgets[cause]} is spent"
    if _idle(history.attempts, saved) >= (PATIENCE_AT_LIMIT if cause == TIMEOUT else PATIENCE):
        return f"ended: no progress, {saved} is still all that is saved"
    return CONTINUES


def _idle(attempts: List[Attempt], saved: int) -> int:
    """Number of latest attempts, including this one, without progress."""
    best = idle = 0
    for each in [*(attempt.saved for attempt in attempts), saved]:
        idle = 0 if each > best else idle + 1
        best = max(best, each)
    return idle
