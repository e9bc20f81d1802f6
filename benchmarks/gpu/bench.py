"""The machine under test, and programs started on it with a time limit and a log each."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcjobs.record import METRICS, SUMMARY
from hpcjobs.record.summary import RunSummary

OF_A_LAUNCHER = ("SLURM", "PMI", "OMPI", "HPCJOBS", "TORCHELASTIC", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
STEP_LIMIT_S = 300.0
POLL_S = 0.05
REHEARSAL_FACTOR = 5.0
"""Of the limits, which are for GPUs: a rehearsal runs on whatever CPU there is, beside whatever else it does."""
KILLED_S = 10.0
"""A process that waits for a GPU that does not answer cannot be killed: no step waits for it longer."""


class OutOfTime(Exception):
    """The minutes of all steps ended within this one."""


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed."""

    code: int
    text: str

    @property
    def last_lines(self) -> str:
        return "\n".join(self.text.strip().splitlines()[-12:])


@dataclass(frozen=True)
class Trained:
    """How the ranks of a run ended, and its run folder."""

    ranks: Sequence[Ended]
    folder: Path

    @property
    def text(self) -> str:
        return "\n".join(rank.text for rank in self.ranks)

    @property
    def code(self) -> int:
        """The first code that is not 0."""
        return next((rank.code for rank in self.ranks if rank.code), 0)

    @property
    def summary(self) -> RunSummary:
        self.require()
        return RunSummary.read(self.folder)

    def losses(self) -> list[float]:
        """Of each line of metrics about steps."""
        self.require()
        return [line["loss"] for line in read_metrics(self.folder) if line["kind"] == "step"]

    def require(self) -> None:
        if self.code or not (self.folder / SUMMARY).exists():
            raise RuntimeError(f"the run in {self.folder} ended with {self.code}: {self.ranks[0].last_lines}")


@dataclass(frozen=True)
class Bench:
    """Where steps run. `rehearse`: on the CPU, with tiny sizes, and without checks of speed.

    `minutes` are for all steps together, up to `end` by the monotonic clock; None: as long as they take.
    """

    out: Path
    device: str  # "cuda" or "cpu"
    ranks: int  # one for each GPU
    rehearse: bool
    minutes: float | None = None
    end: float = math.inf

    @property
    def left_s(self) -> float:
        """The time left for all steps together."""
        return self.end - time.monotonic()

    @contextmanager
    def limit(self, limit_s: float) -> Iterator[float]:
        """A program's own limit, longer in a rehearsal, or the time that is left where that is shorter.

        Raises:
            OutOfTime: the time that was left ended it.
        """
        limit_s *= REHEARSAL_FACTOR if self.rehearse else 1.0
        left_s = self.left_s
        try:
            yield min(limit_s, left_s)
        except TimeoutError:
            if limit_s <= left_s:
                raise
            raise OutOfTime(f"did not end in the {left_s:.0f} s left of {self.minutes:g} minutes") from None

    @property
    def precision(self) -> str:
        """The lower precision that this GPU computes in."""
        if self.device == "cpu":
            return "bf16"
        import torch

        return "bf16" if torch.cuda.get_device_capability()[0] >= 8 or torch.version.hip else "fp16"

    def choose(self, real: Any, tiny: Any) -> Any:
        """A size, or the one of a rehearsal."""
        return tiny if self.rehearse else real

    def train(
        self,
        name: str,
        trainer: str,
        *flags: str,
        device: str | None = None,
        ranks: int | None = None,
        env: Mapping[str, str] | None = None,
        kill_at_step: int | None = None,
    ) -> Trained:
        """Run a bundled trainer as a launcher would, in the run folder `name`; with `kill_at_step`, until SIGKILL."""
        folder = self.out / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-u", "-m", f"hpcjobs.trainers.{trainer}", *flags, "--device", device or self.device]
        size, port = ranks or self.ranks, free_port()
        own = {"HPCJOBS_RUN_DIR": str(folder), **(env or {})}
        processes = [
            start(argv, folder / f"rank{rank}.log", {**own, **position(rank, size, port)}) for rank in range(size)
        ]
        with self.limit(STEP_LIMIT_S) as limit_s:
            if kill_at_step is not None:
                try:
                    await_step(folder, kill_at_step, processes[0], limit_s=limit_s)
                finally:
                    kill_all(processes)
            codes = await_all(processes, limit_s=limit_s)
        texts = [(folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(size)]
        return Trained([Ended(code, text) for code, text in zip(codes, texts, strict=True)], folder)

    def run(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float) -> Ended:
        """Run one program; its output is in NAME.log."""
        log = self.out / "runs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with self.limit(limit_s) as shorter_s:
            [code] = await_all([start(argv, log, env or {})], limit_s=shorter_s)
        return Ended(code, log.read_text(errors="replace"))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def await_step(folder: Path, step: int, process: subprocess.Popen[bytes], *, limit_s: float) -> None:
    """Until the metrics have this step.

    Raises:
        RuntimeError: the run ended before. TimeoutError: it has not come to it within the limit.
    """
    until = time.monotonic() + limit_s
    while not any(line.get("step", 0) >= step for line in read_metrics(folder) if line["kind"] == "step"):
        if process.poll() is not None:
            raise RuntimeError(f"the run in {folder} ended before step {step}")
        if time.monotonic() > until:
            raise TimeoutError(f"the run in {folder} did not come to step {step} in {limit_s:.0f} s")
        time.sleep(POLL_S)


def position(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of a rank on this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "0", **{name: str(value) for name, value in numbers.items()}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A program in a process group of its own, without what an enclosing job says of ranks."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_LAUNCHER)}
    with open(log, "ab") as file:
        file.write(f"$ {shlex.join(argv)}\n".encode())
        file.flush()
        return subprocess.Popen(
            list(argv), env={**clean, **env}, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
        )


def await_all(processes: Sequence[subprocess.Popen[bytes]], *, limit_s: float) -> list[int]:
    """Exit codes, by shells' counting; at the limit, or where this process is interrupted, all are killed."""
    until = time.monotonic() + limit_s
    try:
        for process in processes:
            process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{shlex.join(map(str, processes[0].args))} did not end in {limit_s:.0f} s") from None  # type: ignore[arg-type]
    finally:
        kill_all(processes)
    return [process.returncode if process.returncode >= 0 else 128 - process.returncode for process in processes]


def kill_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill those that still run, with what they have started."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
