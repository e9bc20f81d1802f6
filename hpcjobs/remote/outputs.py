"""Tells the laptop, from the login host, which files to fetch, and ends its command with the connection."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from threading import Thread

from hpcjobs.files import append_lines

OUTPUTS = "HPCJOBS_OUTPUTS"
"""Variable with the path of a list: the command adds each file that it was asked to write."""
_AGAIN_S = 1.0


def record_output(path: Path) -> None:
    """Have the laptop fetch ``path``, a file or folder that the user asked for."""
    record = os.environ.get(OUTPUTS)
    if record is not None:
        append_lines(record, [str(path.absolute())])


def end_with_connection() -> None:
    """Have this process end, as by a closed terminal, when its output has no reader any more.

    Without a terminal, sshd does not end the program when the connection ends. If one ssh of a shared connection ends,
    sshd only closes standard output. SIGHUP is sent every second, because a submission ignores it until it is recorded.
    """
    Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            poll.register(stream.fileno(), 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll()):
        pass
    while True:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(_AGAIN_S)
