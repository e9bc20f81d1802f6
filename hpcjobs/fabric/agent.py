"""``python -m hpcjobs.fabric.agent``: on every node, does what the check asks by lines of JSON, and answers likewise.

First it says who it is and where it listens. Asked ``reach`` it connects to its peers, ``stream`` sends to one of
them, ``memory`` copies within the node. It leaves when its input ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpcjobs.fabric.network import EchoServer, Unreachable, own_address, resolve_name, round_trip_s, stream_rate

_COPY_BYTES, _COPY_S = 16 << 20, 0.5
Answer = dict[str, Any]


def hello(interface: str | None, *, alone: bool) -> tuple[Answer, EchoServer | None]:
    """Who this is; with a server for the others, where there are others and this node has an address for them."""
    me: Answer = {"host": socket.gethostname()}
    if alone:
        return me, None
    try:
        address = own_address(interface)
    except Unreachable as error:
        return me | {"problem": str(error)}, None
    server = EchoServer(address)
    return me | {"address": address, "port": server.port}, server


def reach(me: Answer, peers: Sequence[Mapping[str, Any]]) -> Answer:
    """The round trip in seconds to each peer, or why there is none."""
    with ThreadPoolExecutor(max(1, min(16, len(peers)))) as pool:
        return dict(zip((peer["host"] for peer in peers), pool.map(lambda peer: _reach(me, peer), peers), strict=True))


def _reach(me: Answer, peer: Mapping[str, Any]) -> Answer:
    try:
        seen = resolve_name(peer["name"])
        if seen != peer["address"]:
            raise Unreachable(f"the name {peer['name']} means {seen} here, and {peer['address']} there")
        return {"latency_s": round_trip_s(me["address"], peer["address"], peer["port"])}
    except Unreachable as error:
        return {"problem": str(error)}


def stream(me: Answer, peer: Mapping[str, Any], seconds: float) -> Answer:
    """The rate at which bytes arrive at ``peer``."""
    try:
        return {"bytes_per_s": stream_rate(me["address"], peer["address"], peer["port"], seconds=seconds)}
    except Unreachable as error:
        return {"problem": str(error)}


def memory() -> Answer:
    """Bytes copied a second, by as many threads as there are CPUs for this task (memmove lets go of Python's lock)."""
    threads = min(len(os.sched_getaffinity(0)), int(os.environ.get("OMP_NUM_THREADS") or 1))
    with ThreadPoolExecutor(threads) as pool:
        return {"bytes_per_s": sum(pool.map(lambda _: _copy_rate(), range(threads)))}


def _copy_rate() -> float:
    """The best of many copies: it is what the memory can do, whoever else computes meanwhile."""
    source, target = (ctypes.create_string_buffer(_COPY_BYTES) for _ in range(2))
    ctypes.memmove(target, source, _COPY_BYTES)  # pages come at the first touch
    best, end = float("inf"), time.perf_counter() + _COPY_S
    while (begun := time.perf_counter()) < end:
        ctypes.memmove(target, source, _COPY_BYTES)
        best = min(best, time.perf_counter() - begun)
    return _COPY_BYTES / best


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--interface")
    parser.add_argument("--alone", action="store_true")
    args = parser.parse_args(argv)
    me, server = hello(args.interface, alone=args.alone)
    _say(0, me)
    for line in sys.stdin:
        arguments = json.loads(line)
        _say(arguments.pop("number"), DOES[arguments.pop("do")](**arguments))
    if server is not None:
        server.close()
    return 0


DOES: dict[str, Callable[..., Answer]] = {"reach": reach, "stream": stream, "memory": memory}


def _say(number: int, answer: Answer) -> None:
    """With the number of the question: who asked may have given up on it, and asked another."""
    print(json.dumps({"number": number, "answer": answer}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
