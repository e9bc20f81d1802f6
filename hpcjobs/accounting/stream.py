"""Yields a program's output in blocks as it arrives, since sacct may print more than memory should hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from subprocess import PIPE
from typing import Protocol

from hpcjobs.errors import SchedulerError
from hpcjobs.processes.programs import start


class Streamer(Protocol):
    """Runs a program and gives its output in blocks. Tests put a recorded answer here."""

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]: ...


def stream(argv: Sequence[str], *, env: Mapping[str, str] | None = None, block_bytes: int = 4 << 20) -> Iterator[bytes]:
    """Standard output of ``argv`` in blocks as it comes: for answers too large to hold.

    Raises:
        CommandMissingError: the program is not on PATH.
        SchedulerError: it ended with a code other than 0 (after its output has been given).
    """
    with tempfile.TemporaryFile() as errors:
        with start(argv, env=env, stdout=PIPE, stderr=errors) as process:
            assert process.stdout is not None
            try:
                while block := process.stdout.read(block_bytes):
                    yield block
            except GeneratorExit:
                process.kill()
                raise
        if process.returncode != 0:
            errors.seek(0)
            message = errors.read().decode("utf-8", "replace").strip() or "(nothing)"
            raise SchedulerError(f"{argv[0]} refused (exit code {process.returncode}): {message}")
