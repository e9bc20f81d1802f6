"""`monitor --cancel-idle`: when all nodes have been idle for too long, and what is reported while that is unknown."""

from __future__ import annotations

from hpcjobs.record.monitor import Sample
from hpcjobs.run.progress import NodeSample
from hpcjobs.run.steps import IdleLimit

BEHIND_S = -3600.0
"""The clocks of the nodes are an hour late."""


def node(host: str, taken: float, idle_s: float | None) -> NodeSample:
    return NodeSample(host, BEHIND_S + taken, Sample(time_s=taken, idle_s=idle_s))


class Watched:
    """A job of two nodes with a limit of a minute, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now, self.notes = 0.0, list[str]()
        self._limit = IdleLimit(
            60, interval_s=5, count_nodes=lambda: 2, report=self.notes.append, clock=lambda: self.now
        )

    def look(self, now: float, *nodes: NodeSample) -> float | None:
        self.now = now
        return self._limit.exceeded_s(nodes)


def test_all_nodes_must_be_idle_for_so_long() -> None:
    job = Watched()
    assert job.look(0, node("n1", 0, 900), node("n2", 0, 59)) is None
    assert job.look(5, node("n1", 5, 905), node("n2", 5, 64)) == 64
    assert job.notes == []


def test_a_node_whose_newest_sample_stays_the_same_may_be_busy_and_its_silence_is_reported_once() -> None:
    job = Watched()
    for now in range(60):
        idle_s = job.look(now, node("n1", now, 900), node("n2", 0, 900))
        assert (idle_s is None) == (now >= 15), now
    assert job.notes == ["--cancel-idle has no effect: no new sample from 1 of the job's 2 nodes"]


def test_a_node_that_cannot_tell_is_reported_once() -> None:
    job = Watched()
    for now in (0, 1, 2):
        assert job.look(now, node("n1", now, 900), node("n2", now, None)) is None
    (text,) = job.notes
    assert text.startswith("--cancel-idle has no effect: how long n2 is idle is not known (")
