"""A port of loopback that leads to a session's socket: browsers of this machine open no sockets that are files."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

_CHUNK = 1 << 16


def listen(path: str) -> int:
    """Listen at a free port until this process ends, and carry each connection to the socket ``path``; the port.

    The port is listened at before anybody learns of it, and was bound without SO_REUSEADDR: so no other user can listen
    there too.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    threading.Thread(target=asyncio.run, args=[_serve(listening, path)], daemon=True).start()
    port: int = listening.getsockname()[1]
    return port


async def _serve(listening: socket.socket, path: str) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            server_reader, server_writer = await asyncio.open_unix_connection(path)
            writers.append(server_writer)
            await asyncio.gather(_copy(reader, server_writer), _copy(server_reader, writer))
        except OSError:  # one of both has ended
            pass
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    server = await asyncio.start_server(carry, sock=listening)
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """To the end of ``reader``: whoever has sent everything may still wait for the answer."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
