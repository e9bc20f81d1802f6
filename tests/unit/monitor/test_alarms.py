"""Alarms: which samples raise one, and which do not."""

from __future__ import annotations

import pytest

from hpcjobs.record.monitor import Sample
from hpcjobs.run.progress import NodeSample, find_alarms, idle_s


def node(host: str, **values: object) -> NodeSample:
    return NodeSample(host, 1000.0, Sample(time_s=1.0, **values))  # type: ignore[arg-type]


def texts(*nodes: NodeSample) -> list[str]:
    return [alarm.text for alarm in find_alarms(nodes)]


def test_gpus_that_are_held_and_idle() -> None:
    assert texts(node("n1", gpus=4, idle_s=720.0)) == ["n1: its 4 GPUs are held and idle for 12m00s"]
    assert texts(node("n1", gpus=1, idle_s=599.0)) == []
    assert texts(node("n1", idle_s=9999.0)) == []


def test_a_dead_rank_while_others_run_on_whatever_node() -> None:
    dead = node("n1", ranks=0, ended_ranks=[1], ended_s=61.0)
    assert texts(dead, node("n2", ranks=1)) == ["n1: rank 1 ended 1m01s ago, others still run"]
    assert texts(dead, node("n2", ranks=0)) == []
    assert texts(node("n1", ranks=1, ended_ranks=[1], ended_s=10.0)) == []


def test_memory_close_to_the_limit() -> None:
    assert texts(node("n1", rss_bytes=15 * 2**29, memory_limit_bytes=2**33)) == ["n1: memory 7.5G of 8G"]
    assert texts(node("n1", rss_bytes=2**32, memory_limit_bytes=2**33)) == []
    assert texts(node("n1", rss_bytes=2**40)) == []


@pytest.mark.parametrize(
    ("loads", "host"),
    [
        ([98.0, 40.0, 41.0], "n1"),
        ([98.0, 40.0], "n1"),
        ([95.0, 96.0, 3.0], "n3"),
        ([97.0, 93.0, 80.0], None),
        ([50.0, 10.0, 10.0], None),
        ([98.0], None),
    ],
)
def test_one_node_unlike_the_others(loads: list[float], host: str | None) -> None:
    alarms = find_alarms([node(f"n{number}", busy_percent=load) for number, load in enumerate(loads, 1)])
    assert [alarm.host for alarm in alarms] == ([] if host is None else [host])


def test_samples_of_a_trainer_which_lack_these_values_raise_nothing() -> None:
    assert texts(node("n1", cpu_percent=3.0), node("n2", cpu_percent=99.0)) == []
    assert idle_s([node("n1", cpu_percent=3.0)], expected=1) is None
    assert idle_s([], expected=1) is None


def test_a_job_is_as_idle_as_its_busiest_node() -> None:
    nodes = [node("n1", idle_s=900.0), node("n2", idle_s=30.0)]
    assert idle_s(nodes, expected=2) == 30.0
    assert idle_s(nodes, expected=3) is None
