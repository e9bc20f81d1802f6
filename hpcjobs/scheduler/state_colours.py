"""The colours in which ``hpcjobs ps`` and ``hpcjobs top`` show the states of jobs."""

from hpcjobs.scheduler.base import State


def choose_colour(state: State) -> str:
    """The colour of a state, by a name that rich knows; empty for none."""
    if state is State.COMPLETED:
        return "green"
    if state in (State.CANCELLED, State.PREEMPTED, State.REVOKED):
        return "magenta"
    if state.ended:
        return "red"
    return "cyan" if state is State.RUNNING else "" if state is State.UNKNOWN else "yellow"
