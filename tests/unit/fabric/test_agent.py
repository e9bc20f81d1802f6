"""What the check asks of a node, and what the node answers: two agents of this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hpcjobs.fabric.agent import EchoServer, Unreachable, hello, own_address, round_trip_s, stream_rate
from hpcjobs.fabric.check import Agent

HERE = "127.0.0.1"


@pytest.fixture
def agent() -> Iterator[Agent]:
    started = Agent("here", [sys.executable, "-u", "-m", "hpcjobs.fabric.agent", "--alone"])
    yield started
    started.leave()


def within(agent: Agent, seconds: float = 60) -> dict[str, Any] | None:
    return agent.answer(time.monotonic() + seconds)


def test_bytes_go_there_and_back_and_a_stream_is_timed_where_it_arrives() -> None:
    server = EchoServer(HERE)
    assert 0 < round_trip_s(HERE, HERE, server.port) < 1
    assert stream_rate(HERE, HERE, server.port, seconds=0.1) > 1e6
    server.close()


def test_a_peer_that_does_not_listen_is_unreachable() -> None:
    server = EchoServer(HERE)
    server.close()
    with pytest.raises(Unreachable):
        round_trip_s(HERE, HERE, server.port)


@pytest.mark.parametrize(("interface", "problem"), [("lo", "loopback"), ("ib77", "has no interface ib77")])
def test_an_interface_that_others_cannot_reach_is_a_problem_by_name(interface: str, problem: str) -> None:
    with pytest.raises(Unreachable, match=problem):
        own_address(interface)
    hello_lines, server = hello(interface, alone=False)
    assert problem in hello_lines["problem"]
    assert server is None


def test_an_answer_that_came_too_late_is_not_taken_for_the_next_one(agent: Agent) -> None:
    first = within(agent)
    assert first is not None
    assert first["host"]
    agent.ask(do="memory")
    assert agent.answer(time.monotonic()) is None
    me = {"address": HERE}
    agent.ask(do="reach", me=me, peers=[{"host": "n1", "name": "no.such.host.invalid", "address": HERE, "port": 1}])
    answer = within(agent)
    assert answer is not None
    assert "cannot resolve no.such.host.invalid" in answer["n1"]["problem"]


def test_a_node_whose_agent_does_not_start_answers_nothing_and_its_words_are_kept() -> None:
    dead = Agent("gone", ["bash", "-c", "echo 'srun: error: no such node' >&2; exit 1"])
    assert within(dead) is None
    assert dead.complaint == "srun: error: no such node"
    dead.leave()
