"""Who is far from the others: by what was measured, with few nodes and with many."""

from __future__ import annotations

import pytest

from hpcjobs.fabric.check import pair_hosts
from hpcjobs.fabric.verdict import NodeMeasurements, best, judge


def nodes(**rates: float) -> list[NodeMeasurements]:
    return [NodeMeasurements(host, values={"flops": rate * 1e9}) for host, rate in rates.items()]


def bad(result: list[NodeMeasurements]) -> list[str]:
    return [each.node.host for each in judge(result) if not each.good]


@pytest.mark.parametrize(
    ("rates", "named"),
    [
        ((100, 99), []),
        ((100, 50), ["b"]),
        ((100, 98, 55), ["c"]),
        ((100, 100, 100, 60), ["d"]),
        ((100, 100, 100, 75), []),  # within the tolerance, however alike the others are
        ((100, 80, 60, 90), []),  # so far apart that nobody falls out
        ((100, 102, 98, 101, 99, 100, 40, 45), ["g", "h"]),
        ((100,), []),
    ],
)
def test_the_slow_node_is_named_and_nobody_else(rates: tuple[float, ...], named: list[str]) -> None:
    assert bad(nodes(**dict(zip("abcdefgh", rates, strict=False)))) == named


def test_a_high_latency_is_as_bad_as_a_low_rate_and_both_are_told_with_the_others_value() -> None:
    result = [NodeMeasurements(host, values={"latency_s": 50e-6, "network_bytes_per_s": 1e9}) for host in "abc"]
    result[1].values = {"latency_s": 900e-6, "network_bytes_per_s": 1e8}
    (judged,) = [each for each in judge(result) if not each.good]
    assert judged.node.host == "b"
    assert judged.reasons == ("sends at 0.1 GB/s, the others 1", "answers in 900 µs, the others 50")


def test_a_node_that_failed_is_bad_whatever_was_measured() -> None:
    result = nodes(a=100, b=100)
    result[0].failures.append("interface ib0 is down")
    assert bad(result) == ["a"]


def test_the_best_nodes_are_chosen_in_the_order_of_the_allocation() -> None:
    judged = judge(nodes(a=90, b=100, c=95, d=20))
    assert best(judged, 2) == ["b", "c"]
    assert best(judged, 3) == ["a", "b", "c"]
    assert best(judged, 4) == ["a", "b", "c"]


def test_a_node_that_must_be_chosen_is_or_nobody_is() -> None:
    judged = judge(nodes(a=90, b=100, c=95, d=20))
    assert best(judged, 2, keep="a") == ["a", "b"]
    assert best(judged, 2, keep="d") == []


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_pair_streams_once_and_no_node_twice_at_a_time(count: int) -> None:
    hosts = [f"n{number}" for number in range(count)]
    played = list(pair_hosts(hosts))
    for pairs in played:
        ends = [host for pair in pairs for host in pair]
        assert len(ends) == len(set(ends))
    met = [frozenset(pair) for pairs in played for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2
