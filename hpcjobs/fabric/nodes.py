"""Starts programs on the nodes of the job: one `Agent` per node, or one program over several of them.

Each node's agent is a separate step, so that a silent node does not disturb the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import IO, Any

from hpcjobs.processes.start import own_module_words, start
from hpcjobs.slurm_commands import FENCES, start_on

_LEAVE_S = 5.0


@dataclass(frozen=True)
class HostGroup:
    """The hosts of the job, and how to start programs on them (no ``srun``: this machine)."""

    hosts: tuple[str, ...]
    srun: bool
    mpi: str | None
    cpus_per_task: int | None
    interface: str | None
    suffix: str

    def srun_command(self, hosts: Sequence[str], *, mpi: str | None) -> list[str]:
        """Before a command that is to run once on each of ``hosts``."""
        if not self.srun:
            return []
        options = ["--kill-on-bad-exit=1"]
        options += [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task is not None else []
        return start_on(hosts, *options, *([f"--mpi={mpi}"] if mpi is not None else []))

    def module(self, hosts: Sequence[str], name: str, *arguments: str, mpi: str | None) -> list[str]:
        """The command that runs a Python module once on each of ``hosts``."""
        return [*self.srun_command(hosts, mpi=mpi), sys.executable, "-u", *own_module_words(name), *arguments]

    def world(self, hosts: Sequence[str]) -> dict[str, str]:
        """The variables of a program over ``hosts``, with a smaller world than the job's."""
        if not self.srun:
            return {}
        size = str(len(hosts))
        by = f"srun --mpi={self.mpi}" if self.mpi else "srun"
        variables = {"HPCJOBS_NTASKS": size, "HPCJOBS_NNODES": size, "HPCJOBS_LAUNCHED_BY": by}
        variables |= dict([FENCES]) if FENCES[0] not in os.environ else {}
        return variables | {"MASTER_ADDR": hosts[0] + self.suffix, "SLURM_JOB_NUM_NODES": size}


class Agent:
    """One node's agent, from this side."""

    def __init__(self, host: str, command: Sequence[str]) -> None:
        self.host, self._number = host, 0
        self._lines: queue.Queue[str] = queue.Queue()
        self._complaints: list[str] = []
        self._process = start(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, new_session=True)
        self._readers = [
            threading.Thread(target=_hand_over, args=pair, daemon=True)
            for pair in ((self._process.stdout, self._lines.put), (self._process.stderr, self._complaints.append))
        ]
        for reader in self._readers:
            reader.start()

    def ask(self, **request: object) -> None:
        """Send a request; an agent that has ended does not read it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._number += 1
            self._process.stdin.write(json.dumps({"number": self._number, **request}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """The answer to the last question (at first: its name), by ``deadline`` (monotonic); None: not yet."""
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                message: dict[str, Any] = json.loads(self._lines.get(timeout=min(left, 0.2)))
                if message["number"] == self._number:
                    answer: dict[str, Any] = message["answer"]
                    return answer
            if self._process.poll() is not None and self._lines.empty():
                return None
        return None

    @property
    def complaint(self) -> str:
        """The last error message of the agent or of srun."""
        lines = [line.strip() for line in self._complaints]
        return next((line for line in lines if "error" in line), lines[-1] if lines else "")

    def leave(self) -> None:
        """Let it go, by force after some seconds."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        end(self._process, patience_s=_LEAVE_S)
        for reader in self._readers:
            reader.join(_LEAVE_S)


def _hand_over(lines: IO[bytes], take: Callable[[str], None]) -> None:
    with lines:
        for line in lines:
            take(line.decode("utf-8", "replace"))


def end(process: Popen[bytes], *, patience_s: float) -> None:
    """Wait for a process, then end it and its group: TERM first, so that srun ends its tasks."""
    for number in (signal.SIGTERM, signal.SIGKILL, None):
        with contextlib.suppress(TimeoutExpired):
            process.wait(patience_s)
            return
        if number is not None:
            os.killpg(process.pid, number)
    process.wait()


@contextlib.contextmanager
def agents(place: HostGroup) -> Iterator[list[Agent]]:
    """One on every host, started; they leave at the end."""
    flags = ["--interface", place.interface] if place.interface else []
    flags += ["--alone"] if len(place.hosts) == 1 else []
    name = "hpcjobs.fabric.agent"
    agents = [Agent(host, place.module((host,), name, *flags, mpi="none")) for host in place.hosts]
    try:
        yield agents
    finally:
        with ThreadPoolExecutor(len(agents)) as pool:
            list(pool.map(Agent.leave, agents))


class Failed(Exception):
    """A program over several nodes failed, or did not end in time; the last lines it printed."""


def run(command: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> None:
    """Run ``command`` to its end."""
    with start(command, env={**os.environ, **env}, stdout=PIPE, stderr=STDOUT, new_session=True) as process:
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except TimeoutExpired:
            end(process, patience_s=0)
            raise Failed(f"did not end in {timeout_s:.0f} s") from None
    if process.returncode != 0:
        lines = [line.strip() for line in out.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line or line.startswith("matmul:")] or lines
        raise Failed((errors or [f"ended with {process.returncode}"])[0][:300])
