"""A terminal in which a command of this process prints."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from commandline import Answer, within_streams


class Screen:
    """What was printed, with the terminal's own control sequences."""

    def __init__(self) -> None:
        self.text = ""


@contextmanager
def screen(columns: int, **environment: str) -> Iterator[Screen]:
    """Standard output and error are a terminal of this width, in colours; ``environment`` is added."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    settings = termios.tcgetattr(slave)
    settings[1] &= ~termios.OPOST  # newlines as they are printed
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    seen, printed = Screen(), bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(master, 1 << 16)
            except OSError:  # the other side is closed
                return
            if not data:
                return
            printed.extend(data)

    reader = threading.Thread(target=read)
    stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115 # closed before the reader is awaited
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    reader.start()
    try:
        with (
            patch.object(sys, "stdout", stream),
            patch.object(sys, "stderr", stream),
            patch.object(sys, "__stdout__", stream),
            patch.dict(os.environ, variables | {"TERM": "xterm-256color"} | environment, clear=True),
        ):
            yield seen
    finally:
        stream.close()
        reader.join()
        os.close(master)
        seen.text = printed.decode("utf-8", "replace")


def on_terminal(*arguments: str, columns: int, **environment: str) -> Answer:
    """``hpcjobs ARGUMENTS`` in this process on a terminal; both streams are in ``out``, as a user sees them."""
    with screen(columns, **environment) as seen:
        code = within_streams(*arguments)
    return Answer(code, seen.text, "")
