"""``python -m hpcjobs.fabric.agent``: on every node, does the tasks that the check sends as lines of JSON, and answers.

First it sends its name and the addresses where it listens. For ``reach`` it connects to its peers, for ``stream`` it
sends to one of them, for ``memory`` it copies within the node. It leaves when its input ends.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import ipaddress
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915
CONNECT_S = 5.0
_PING, _STREAM = b"p", b"s"
_FLOAT = struct.Struct("!d")
_CHUNK = bytes(256 * 1024)
_ROUND_TRIPS = 50


class Unreachable(Exception):
    """Why one node does not reach another, or has no address to be reached at."""


def own_address(interface: str | None) -> str:
    """The IPv4 address that other nodes reach this one at: of ``interface``, or of the host's own name.

    Raises Unreachable: no address, or one that only this node can use.
    """
    if interface is None:
        return _not_loopback(resolve_name(socket.gethostname()), f"the name {socket.gethostname()}")
    folder = Path("/sys/class/net") / interface
    if not folder.exists():
        there = ", ".join(sorted(path.name for path in folder.parent.iterdir()))
        raise Unreachable(f"has no interface {interface} (there are: {there})")
    state = (folder / "operstate").read_text().strip()
    if state not in ("up", "unknown"):
        raise Unreachable(f"interface {interface} is {state}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise Unreachable(f"interface {interface} has no IPv4 address") from error
    return _not_loopback(socket.inet_ntoa(answer[20:24]), f"interface {interface}")


def _not_loopback(address: str, what: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        raise Unreachable(f"{what} is the loopback address {address}, which no other node reaches")
    return address


def resolve_name(name: str) -> str:
    """The IPv4 address of ``name`` as this node sees it (Unreachable: it has none)."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise Unreachable(f"cannot resolve {name}: {error.strerror}") from error


class EchoServer:
    """Answers other nodes until it is closed, with one thread per connection."""

    def __init__(self, address: str) -> None:
        self._listening = socket.create_server((address, 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept, which would keep it open
        self._listening.close()


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(30)
        try:
            kind = connection.recv(1)
            if kind == _PING:
                while ping := connection.recv(_FLOAT.size):
                    connection.sendall(ping)
            elif kind == _STREAM:
                _take_stream(connection)
        except OSError:
            return  # the other side reports the error itself


def _take_stream(connection: socket.socket) -> None:
    """Count the bytes in the sender's time span, send the rate back, and read on until the sender stops."""
    (seconds,) = _FLOAT.unpack(connection.recv(_FLOAT.size, socket.MSG_WAITALL))
    space = bytearray(1 << 20)
    count, begun = 0, time.perf_counter()
    while (took := time.perf_counter() - begun) < seconds:
        ready, _, _ = select.select([connection], [], [], seconds - took)
        count += connection.recv_into(space) if ready else 0
    connection.sendall(_FLOAT.pack(count / (time.perf_counter() - begun)))
    while connection.recv_into(space):
        pass


def _connect(source: str, address: str, port: int) -> socket.socket:
    """Connect from the chosen interface: another route would not test it."""
    try:
        return socket.create_connection((address, port), timeout=CONNECT_S, source_address=(source, 0))
    except OSError as error:
        raise Unreachable(error.strerror or "no answer") from error


def round_trip_s(source: str, address: str, port: int) -> float:
    """Time of eight bytes there and back: the tenth percentile, because single delays have other causes.

    Raises Unreachable: they do not come back.
    """
    with _connect(source, address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        took = []
        try:
            connection.sendall(_PING)
            for _ in range(_ROUND_TRIPS):
                begun = time.perf_counter()
                connection.sendall(_FLOAT.pack(begun))
                if len(connection.recv(_FLOAT.size, socket.MSG_WAITALL)) < _FLOAT.size:
                    raise Unreachable("hung up")
                took.append(time.perf_counter() - begun)
        except OSError as error:
            raise Unreachable(error.strerror or "stopped answering") from error
    return sorted(took)[len(took) // 10]


def stream_rate(source: str, address: str, port: int, *, seconds: float) -> float:
    """Bytes a second that arrive there during ``seconds`` of sending (Unreachable: the connection broke)."""
    with _connect(source, address, port) as connection:
        try:
            connection.sendall(_STREAM + _FLOAT.pack(seconds))
            end = time.monotonic() + seconds + CONNECT_S
            while time.monotonic() < end:
                readable, able, _ = select.select([connection], [connection], [], CONNECT_S)
                if readable:
                    rate: float = _FLOAT.unpack(connection.recv(_FLOAT.size, socket.MSG_WAITALL))[0]
                    return rate
                if able:
                    connection.send(_CHUNK)
        except (OSError, struct.error) as error:
            raise Unreachable("broke off") from error
    raise Unreachable("the receiver did not answer")


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
    """The round trip in seconds to each peer, or the reason why it failed."""
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
    """The best of many copies: the rate of the memory without disturbance by other processes."""
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
