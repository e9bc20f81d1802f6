"""Ranks as copies of one process that has loaded torch: a start costs milliseconds where it cost seconds.

A copy has the environment, folder and files of its own that a started process would have; only the loading of
torch is shared. A few tests start real processes nevertheless.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

COPIES = multiprocessing.get_context("forkserver")
TORCH = ("torch.nn.parallel", "torch.distributed.fsdp", "torch._dynamo")  # the last one with the first optimizer
COPIES.set_forkserver_preload(["pytest", "hpcjobs.trainers.loop", *TORCH])


class Rank:
    """As much of a Popen as the tests use."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, notes: Path) -> None:
        self._out, self._err = notes / "out", notes / "err"
        self._process = COPIES.Process(target=_become, args=(list(argv), dict(env), str(cwd), self._out, self._err))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def read_output(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(encoding="utf-8") if self._out.exists() else ""

    def communicate(self, *, timeout: float) -> tuple[str, str]:
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            raise TimeoutError(f"a rank did not end in {timeout} s: {self._err.read_text(encoding='utf-8')}")
        return self._out.read_text(encoding="utf-8"), self._err.read_text(encoding="utf-8")


def _become(argv: list[str], env: dict[str, str], cwd: str, out: Path, err: Path) -> NoReturn:
    """`python -u -m argv`, with what the environment says of paths and warnings."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [cwd, *env.get("PYTHONPATH", "").split(":")]
    warnings.simplefilter(env["PYTHONWARNINGS"])  # type: ignore[arg-type]  # error, or ignore in make lowest
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")  # of torch in itself
    sys.argv = list(argv)
    code: object = 0
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    raise SystemExit(code)
