"""Many connections over one pair of pipes: whole, in order, and none held up by another."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from hpcjobs.node.session.relay import WINDOW, Mux

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect_pair() -> tuple[Streams, Streams]:
    """Both ends of a pipe that goes both ways."""
    here, there = socket.socketpair()
    return await asyncio.open_connection(sock=here), await asyncio.open_connection(sock=there)


class Carried:
    """A server reached through two multiplexers; ``connect`` is what a browser does.

    The far one makes its connections with ``opened``; the usual one leads to ``serve``.
    """

    def __init__(self, serve: Serve, open_streams: Callable[[int], Awaitable[Streams]] | None = None) -> None:
        self._serve = serve
        self._open_connection = open_streams or (lambda port: asyncio.open_connection("127.0.0.1", port))
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Carried:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        near, far = await connect_pair()
        mux = Mux(*near, None)
        ends = [mux.run(), Mux(*far, lambda: self._open_connection(port)).run()]
        self._tasks = [asyncio.ensure_future(end) for end in ends]
        self._front = await asyncio.start_server(mux.connect, "127.0.0.1", 0)
        self._servers = [server, self._front]
        self._writers += [near[1], far[1]]
        return self

    async def connect(self) -> Streams:
        reader, writer = await asyncio.open_connection(*self._front.sockets[0].getsockname())
        self._writers.append(writer)
        return reader, writer

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(9999):
        writer.write(data)
        await writer.drain()
    await closed(writer)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_bytes_of_every_kind_come_back_as_they_were_sent() -> None:
    async def test() -> None:
        async with Carried(echo) as carried:
            reader, writer = await carried.connect()
            sent = bytes(range(256)) * 40 + os.urandom(5 * WINDOW) + b"\n\n"
            writer.write(sent)
            writer.write_eof()
            assert await reader.read() == sent

    run(test)


def test_twenty_connections_at_once_get_each_their_own_answer() -> None:
    async def test() -> None:
        async with Carried(echo) as carried:

            async def one(number: int) -> None:
                reader, writer = await carried.connect()
                for turn in range(20):
                    writer.write(b"%d.%d\n" % (number, turn))
                    assert await reader.readline() == b"%d.%d\n" % (number, turn)

            await asyncio.gather(*map(one, range(20)))

    run(test)


def test_a_download_that_nobody_reads_holds_up_no_other_connection() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline() == b"hello\n":
            writer.write(b"hello\n")
            await closed(writer)
            return
        with contextlib.suppress(OSError):
            for _ in range(200):
                writer.write(b"x" * WINDOW)
                await writer.drain()
        await closed(writer)

    async def test() -> None:
        async with Carried(flood) as carried:
            _, stuck = await carried.connect()
            stuck.write(b"everything\n")
            await stuck.drain()
            for _ in range(5):
                reader, writer = await carried.connect()
                writer.write(b"hello\n")
                assert await reader.readline() == b"hello\n"
            stuck.transport.abort()

    run(test)


def test_a_server_that_closes_ends_the_connection_of_the_browser() -> None:
    async def short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        await closed(writer)

    async def test() -> None:
        async with Carried(short) as carried:
            reader, _ = await carried.connect()
            assert await reader.read() == b"bye"

    run(test)


def test_a_server_that_is_gone_ends_the_connection_and_the_next_one_works() -> None:
    async def test() -> None:
        problems = [ConnectionRefusedError("nobody listens")]

        async def open_connection(port: int) -> Streams:
            if problems:
                raise problems.pop()
            return await asyncio.open_connection("127.0.0.1", port)

        async with Carried(echo, open_connection) as carried:
            reader, _ = await carried.connect()
            assert await reader.read() == b""
            reader, writer = await carried.connect()
            writer.write(b"there?\n")
            assert await reader.readline() == b"there?\n"

    run(test)
