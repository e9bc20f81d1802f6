"""The command line as a user calls it, for tests."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hpcjobs.cli import main


@dataclass(frozen=True)
class Answer:
    """What one call gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def start(
    *arguments: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[str]:
    """``hpcjobs ARGUMENTS`` begun; ``env`` is added to the environment of the test."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpcjobs", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=start_new_session,
    )


def hpcjobs(
    *arguments: str, cwd: str | Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 500
) -> Answer:
    """``hpcjobs ARGUMENTS`` to its end."""
    return await_answer(start(*arguments, cwd=cwd, env=env), timeout_s=timeout_s)


def await_answer(process: subprocess.Popen[str], *, timeout_s: float) -> Answer:
    """What ``process`` printed, and its exit code; it is killed when the time is over."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Answer(process.returncode, out, err)


def within_streams(*arguments: str) -> int:
    """``hpcjobs ARGUMENTS`` in this process, printing to its streams; the exit code.

    A command may leave signals ignored, which programs of later tests would inherit: the handlers are set back.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with patch.object(sys, "argv", ["hpcjobs", *arguments]):
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            for number, handler in handlers.items() if main_thread else ():
                signal.signal(number, handler)
    return 0


def within(*arguments: str) -> Answer:
    """``hpcjobs ARGUMENTS`` in this process: the same way through, without the cost of a start."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = within_streams(*arguments)
    return Answer(code, out.getvalue(), err.getvalue())


def moment(text: str) -> float:
    """Seconds since 1970 of a time in JSON; Python 3.10 reads no Z."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def ok(*arguments: str) -> Answer:
    """``hpcjobs ARGUMENTS`` in this process, which must succeed."""
    answer = within(*arguments)
    assert answer.code == 0, answer
    return answer
