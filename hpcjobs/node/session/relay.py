"""Connections carried over the input and output of one step of the job, for sites that allow no ssh to a node.

On the login node ``relay`` listens at a socket that only its owner can open, and starts ``carry`` on the session's node
through srun. Both speak frames: a header (stream, kind, length), the bytes, and a newline, since Slurm hands on whole
lines. Each stream may have `WINDOW` bytes in flight, which the other side credits once they are written: a stream
without a reader does not block the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hpcjobs.node.session import files
from hpcjobs.node.session.files import relay_socket
from hpcjobs.processes.start import start_async
from hpcjobs.slurm_commands import cluster_env, start_beside

WINDOW = 1 << 18
GREETING = b"hpcjobs carries 1\n"
"""Mark before the first frame: output of a prolog may come first."""
_HEADER = struct.Struct("!IBI")
_OPEN, _DATA, _END, _CREDIT = range(4)
_CHUNK = 1 << 15
_GREETING_S = 120.0
_STOP_S = 5.0

Connect = Callable[[], Awaitable["tuple[asyncio.StreamReader, asyncio.StreamWriter]"]]


class _Stream:
    """One connection: received bytes, and the number of bytes that may still be sent."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.credit = WINDOW
        self.credited = asyncio.Event()

    async def spend(self, count: int) -> None:
        while self.credit <= 0:
            self.credited.clear()
            await self.credited.wait()
        self.credit -= count


class Mux:
    """Many connections over one pair of pipes; ``opened`` makes the connection that the other side asks for."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect | None) -> None:
        self._reader, self._writer, self._open_connection = reader, writer, connect
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection of this side to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        number = next(self._numbers)
        self._streams[number] = _Stream()
        self._send(number, _OPEN)
        await self._carry(number, reader, writer)

    async def run(self) -> None:
        """Take in frames until the other side ends."""
        try:
            while True:
                number, kind, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                data = (await self._reader.readexactly(length + 1))[:-1]
                self._take(number, kind, data)
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writer.close()

    def _take(self, number: int, kind: int, data: bytes) -> None:
        if kind == _OPEN:
            self._streams[number] = _Stream()
            task = asyncio.ensure_future(self._answer(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        stream = self._streams.get(number)
        if stream is None:
            return  # it ended here while this was under way
        if kind == _CREDIT:
            stream.credit += int.from_bytes(data, "big")
            stream.credited.set()
        else:
            stream.arrived.put_nowait(data if kind == _DATA else b"")

    async def _answer(self, number: int) -> None:
        assert self._open_connection is not None, "only the side that has a way to connect opens connections"
        try:
            reader, writer = await self._open_connection()
        except OSError as error:
            print(f"hpcjobs: the session does not answer: {error}", file=sys.stderr, flush=True)
            self._send(number, _END)
            del self._streams[number]
            return
        await self._carry(number, reader, writer)

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy each direction until it ends: a client may still wait for the answer after its last byte."""
        outward = asyncio.ensure_future(self._outward(number, reader))
        try:
            await self._inward(number, writer)
            await outward
        except OSError:  # the reader has ended
            pass
        finally:
            outward.cancel()
            self._send(number, _END)
            self._streams.pop(number, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _outward(self, number: int, reader: asyncio.StreamReader) -> None:
        stream = self._streams[number]
        while data := await reader.read(_CHUNK):
            await stream.spend(len(data))
            self._send(number, _DATA, data)
            await self._writer.drain()
        self._send(number, _END)

    async def _inward(self, number: int, writer: asyncio.StreamWriter) -> None:
        stream = self._streams[number]
        while data := await stream.arrived.get():
            writer.write(data)
            await writer.drain()
            self._send(number, _CREDIT, len(data).to_bytes(4, "big"))
        if writer.can_write_eof():
            writer.write_eof()

    def _send(self, number: int, kind: int, data: bytes = b"") -> None:
        self._writer.write(_HEADER.pack(number, kind, len(data)) + data + b"\n")


def carry(run_dir: Path) -> int:
    """The node's end: opens a connection to the session's server for each one that is requested."""
    connection = files.read_connection(run_dir)
    if connection is None:
        print("hpcjobs: the session does not answer", file=sys.stderr, flush=True)
        return 1

    async def open_connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(connection.socket)

    async def main() -> None:
        reader, writer = await _pipes(sys.stdin.fileno(), sys.stdout.fileno())
        writer.write(GREETING)
        await Mux(reader, writer, open_connection).run()

    asyncio.run(main())
    return 0


def relay(run_dir: Path) -> int:
    """The login node's end, in the foreground, until the session ends or whoever started this goes away."""
    return asyncio.run(_relay(run_dir))


async def _relay(run_dir: Path) -> int:
    settings, connection = files.read_settings(run_dir), files.read_connection(run_dir)
    if connection is None or settings.srun is None:
        print(f"hpcjobs: no session answers in {run_dir}", file=sys.stderr, flush=True)
        return 1
    where = Path(relay_socket(settings.relay_folder, connection.job_id))
    _own_folder(where.parent)
    environment = os.environ | cluster_env(settings.slurm_conf)
    _, *options = start_beside(connection.job_id, [connection.host], "--quiet")
    carry = [connection.python, str(run_dir / files.BUNDLE), "carry", str(run_dir)]
    step = await start_async([settings.srun, *options, *carry], env=environment)
    try:
        return await _listen(step, where)
    finally:
        await _end(step)


async def _listen(step: asyncio.subprocess.Process, where: Path) -> int:
    assert step.stdin is not None
    assert step.stdout is not None
    peer_ended = _watch_peer()
    try:
        await asyncio.wait_for(step.stdout.readuntil(GREETING), _GREETING_S)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError):
        print("hpcjobs: no step of the job could be started to carry the connection", file=sys.stderr, flush=True)
        return 1
    mux = Mux(step.stdout, step.stdin, None)
    beside = where.with_name(str(os.getpid()))  # no longer than the name itself
    server = await asyncio.start_unix_server(mux.connect, str(beside))
    os.chmod(beside, 0o600)
    mine = beside.stat().st_ino
    beside.rename(where)  # new connections find the newest relay
    carrying = asyncio.ensure_future(mux.run())
    try:
        await asyncio.wait({carrying, peer_ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.close()
        if where.exists() and where.stat().st_ino == mine:
            where.unlink()
        carrying.cancel()
    return 0


def _own_folder(folder: Path) -> None:
    """A folder for sockets that is ours alone."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"hpcjobs: no folder for the session's socket on this host: {error}") from error
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise SystemExit(f"hpcjobs: {folder} is not a folder of yours alone: chmod 700 it, or remove it")


def _watch_peer() -> asyncio.Future[None]:
    """Done when the process that started this has ended: by a signal, or by closing the other end of our output."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, tell)

    def listen() -> None:
        poll = select.poll()
        poll.register(1, 0)  # errors and hang-ups are always reported
        poll.poll()
        loop.call_soon_threadsafe(tell)

    threading.Thread(target=listen, daemon=True).start()
    return ended


async def _end(step: asyncio.subprocess.Process) -> None:
    """Its input ends, so the node's end ends; one that does not is terminated, then killed."""
    assert step.stdin is not None
    step.stdin.close()
    over = asyncio.ensure_future(step.wait())
    for tell in (step.terminate, step.kill):
        done, _ = await asyncio.wait({over}, timeout=_STOP_S)
        if done:
            return
        tell()
    await over


async def _pipes(read_from: int, write_to: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A process's own input and output as streams."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_from, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop=loop), os.fdopen(write_to, "wb", 0)
    )
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
