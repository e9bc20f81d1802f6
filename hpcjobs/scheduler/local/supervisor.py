"""``python -m hpcjobs.scheduler.local.supervisor JOBDIR FD``: waits for a local job's turn, then has it run.

FD is the handle that holds the job's lock. The process puts itself into the background: that the command
returns says that the job is looked after.
"""

from __future__ import annotations

import os
import sys
import time

from hpcjobs.processes.events import SupervisorEvents
from hpcjobs.processes.fork import continue_in_background, fork_call
from hpcjobs.scheduler.local import queue
from hpcjobs.scheduler.local.job_folder import LocalJob, is_alive
from hpcjobs.scheduler.local.policy import Never, Wait
from hpcjobs.scheduler.local.records import Ended, Request
from hpcjobs.scheduler.local.runner import run

CHECK_S = 1.0
"""How often one that waits makes sure that those it waits for were not killed."""


def main(argv: list[str]) -> int:
    folder, alive = argv
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
    """The supervisor of an array: waits for each task's turn, and starts a supervisor of its own for it."""

    def __init__(self, job: LocalJob, request: Request, alive: int) -> None:
        self._job, self._request, self._alive = job, request, alive
        self.running: set[int] = set()

    def start(self, claim: queue.Claim, events: SupervisorEvents) -> None:
        pid = fork_call(lambda: self._supervise(claim, events))
        if claim.alive is not None:
            os.close(claim.alive)
        self.running.add(pid)

    def _supervise(self, claim: queue.Claim, events: SupervisorEvents) -> None:
        """In a process of its own: run one task to its end."""
        # The lock of the whole array says that *its* supervisor lives.
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
        queue.finish(self._job, Ended(state, time.time(), exit_code=max(codes, default=None)))


def _wait_for_turns(job: LocalJob, request: Request, events: SupervisorEvents, array: _Array | None) -> None:
    """Until the job, or the last task of the array, has ended."""
    while True:
        turn = queue.claim(job)
        if isinstance(turn, queue.Claim):
            if array is None:
                events.close()
                run(job, request, turn.started)
                return
            array.start(turn, events)
            continue
        if isinstance(turn, Never):
            queue.finish(job, Ended("CANCELLED", time.time(), reason=turn.reason))
            return
        if turn is None and (array is None or not array.running):
            if array is not None and job.read_ended() is None:
                array.finish()
            return
        _wait(turn, events, array)
        if events.stop_requested:
            queue.cancel(job)


def _wait(turn: Wait | None, events: SupervisorEvents, array: _Array | None) -> None:
    """Until something happened, or one that is waited for turns out to have been killed."""
    watch = turn.watch if turn is not None else ()
    while not events.wait(CHECK_S if watch else None):
        if any(other.read_ended() is not None or not is_alive(other) for other in watch):
            break
    if array is not None:
        array.reap()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
