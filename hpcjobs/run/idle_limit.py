"""Checks whether a job has been idle for too long, as `hpcjobs monitor --cancel-idle` asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hpcjobs.run.alarms import idle_s
from hpcjobs.run.monitor import fresh_for_s
from hpcjobs.run.samples import NodeSample
from hpcjobs.scheduler.outage import Report


class IdleLimit:
    """Looks at the newest samples of a job's nodes; a node without a new one may be busy.

    A sample is new for some time after it came, by this machine's clock: the clocks of the nodes may differ from it.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        interval_s: float,
        count_nodes: Callable[[], int],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._fresh_s, self._count_nodes = limit_s, fresh_for_s(interval_s), count_nodes
        self._report, self._clock = report, clock
        self._came: dict[str, tuple[float, float]] = {}
        """By the host: when its newest sample was taken by the node's clock, and when it came by this machine's."""
        self._complete = clock()
        self._reported = ""

    def exceeded_s(self, nodes: Sequence[NodeSample]) -> float | None:
        """For how long all nodes have been idle, if that is too long; None: it is not, or it is not known."""
        now, expected = self._clock(), self._count_nodes()
        for node in nodes:
            if self._came.get(node.host, (None,))[0] != node.taken:
                self._came[node.host] = (node.taken, now)
        fresh = [node for node in nodes if now - self._came[node.host][1] < self._fresh_s]
        if len(fresh) >= expected:
            self._complete = now
        self._report_doubts(fresh, expected, is_late=now - self._complete >= self._fresh_s)
        idle_for_s = idle_s(fresh, expected=expected)
        return idle_for_s if idle_for_s is not None and idle_for_s >= self._limit_s else None

    def _report_doubts(self, fresh: Sequence[NodeSample], expected: int, *, is_late: bool) -> None:
        """Say once why the job is not cancelled, whatever it does."""
        doubt = ""
        if unknown := [node.host for node in fresh if node.sample.idle_s is None]:
            reason = "its GPUs cannot be read, or a trainer takes its samples"
            doubt = f"how long {', '.join(unknown)} is idle is not known ({reason})"
        elif is_late:
            doubt = f"no new sample from {expected - len(fresh)} of the job's {expected} nodes"
        if doubt and doubt != self._reported:
            self._report(f"--cancel-idle has no effect: {doubt}")
        self._reported = doubt or self._reported
