"""Virtual time: processes that take turns, a clock that jumps to the next event, and faults drawn from a seed.

A process is a greenlet. It gives way where it sleeps, starts a program, or changes a file. There the world may kill it,
which leaves it where it stands: nothing of it runs again, as after SIGKILL. Time passes only while all sleep.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import greenlet

EPOCH_S = 1_900_000_000.0
"""When a world begins: later than any real time stamp, so that a file's real time is never later than its job's."""
MEAN_DELAYS_S = (0.0, 0.0, 0.0, 2.0, 15.0)
"""How long a command takes on average before Slurm acts on it, and after that: a busy cluster answers late."""
MOST_EVENTS = 100_000
"""Of one schedule; most have some hundreds."""


class Fault(NamedTuple):
    """One fault of a schedule: at the ``at``-th point of its kind."""

    kind: str
    at: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}@{self.at}" + (f":{self.detail}" if self.detail else "")


class Killed(BaseException):
    """Nothing runs on in this process."""


class Process:
    """A program that runs in virtual time."""

    def __init__(self, world: World, name: str, main: Callable[[], Any], *, host: str, pid: int) -> None:
        self.name, self.host, self.pid, self.environ = name, host, pid, dict[str, str]()
        self.started = world.now
        self.alive, self.result = True, None
        self.error: BaseException | None = None
        self.signals: list[int] = []
        self.handlers: dict[int, Any] = {}
        self.waits_for_signals = False
        self.has_submitted = False
        """A scheduler accepted a job of it: what it writes now is the record of that."""
        self.wake_number = 0
        self._world, self._main = world, main
        self.greenlet = greenlet.greenlet(self._run, parent=world.hub)

    def _run(self) -> None:
        try:
            self.result = self._main()
        except Killed:
            pass
        except greenlet.GreenletExit:
            raise
        except BaseException as error:  # the checkers decide about it
            self.error = error
        self._world.end(self)


class World:
    """The clock, the processes, and the faults of one schedule."""

    def __init__(self, seed: int, *, faults: list[Fault] | None = None) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.now = EPOCH_S
        self._delays = random.Random(seed * 7 + 3)
        self._mean_delay_s = self._delays.choice(MEAN_DELAYS_S)
        self.skew = 0.0
        """Of the clock that programs read as wall time: jumps of it do not move sleeping processes."""
        self.skews: dict[str, float] = {}
        """By how much the clocks of hosts are ahead."""
        self.hub = greenlet.getcurrent()
        self.current: Process | None = None
        self.processes: list[Process] = []
        self.trace: list[str] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._pids = itertools.count(1000)
        self.points: dict[str, int] = {}
        self.faults: dict[tuple[str, int], str] = {}
        self.events = 0
        self.full_until = 0.0
        """Until then nothing can be written."""
        self.injected: list[Fault] = []
        self.misled: list[str] = []
        """Processes to which a command gave a wrong answer with exit code 0."""
        self.disturbed: set[int] = set()
        """Processes that met a fault, by their ids."""
        self.warnings: list[str] = []
        self.problems: list[str] = []
        """What a process found wrong by itself."""
        for fault in faults or []:
            self.faults[fault.kind, fault.at] = fault.detail

    # --- time and processes

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay_s, call)

    def start(self, name: str, main: Callable[[], Any], *, host: str = "login1", delay_s: float = 0.0) -> Process:
        process = Process(self, name, main, host=host, pid=next(self._pids))
        self.processes.append(process)
        self._wake_at(process, self.now + delay_s)
        return process

    def _wake_at(self, process: Process, when: float) -> None:
        process.wake_number += 1
        number = process.wake_number

        def wake() -> None:
            if process.alive and process.wake_number == number:
                process.wake_number += 1
                self.current = process
                process.greenlet.switch()
                self.current = None

        self.at(when, wake)

    def sleep(self, seconds: float) -> None:
        """The current process sleeps."""
        process = self.current
        if process is None:
            raise AssertionError("only a process sleeps")
        self._wake_at(process, self.now + max(seconds, 0.0))
        self.hub.switch()
        if not process.alive:
            raise Killed

    def delay(self, longest_mean_s: float) -> None:
        """Let the time pass that a command takes: what the current process read before is old afterwards."""
        self.sleep(0.05 + self._delays.expovariate(1.0) * min(self._mean_delay_s, longest_mean_s))

    def wait_signals(self, timeout_s: float | None) -> list[int]:
        """The signals that came to the current process; one wakes it."""
        process = self.current
        assert process is not None
        if not process.signals:
            process.waits_for_signals = True
            if timeout_s is None:
                process.wake_number += 1
                self.hub.switch()
                if not process.alive:
                    raise Killed
            else:
                self.sleep(timeout_s)
            process.waits_for_signals = False
        received, process.signals = process.signals, []
        return received

    def signal(self, process: Process, number: int) -> None:
        if not process.alive:
            return
        process.signals.append(number)
        if process.waits_for_signals:
            self._wake_at(process, self.now)

    def end(self, process: Process) -> None:
        process.alive = False

    def kill(self, process: Process) -> None:
        """As SIGKILL: it never runs again."""
        if process.alive:
            process.alive = False
            self.log(f"{process.name}: killed")
            if process is self.current:
                raise Killed

    def run(self, limit_s: float) -> None:
        """Let time pass until nothing is left to happen, or for so long."""
        end = self.now + limit_s
        while self._events and self._events[0][0] <= end:
            when, _, call = heapq.heappop(self._events)
            self.now = max(self.now, when)
            self.events += 1
            if self.events > MOST_EVENTS:
                raise AssertionError(f"more than {MOST_EVENTS} events: something goes on for ever")
            call()
        self.now = max(self.now, end if self._events else self.now)

    def close(self) -> None:
        """End what was left: its clean-up has no effect, as every file operation is refused to a dead process."""
        for process in self.processes:
            process.alive = False
            if process.greenlet:
                self.current = process
                process.greenlet.throw(greenlet.GreenletExit)
        self.current = None

    # --- faults

    def point(self, kind: str) -> str | None:
        """Whether a fault happens here: its detail. A dead process gets no further."""
        process = self.current
        if process is not None and not process.alive:
            raise Killed
        count = self.points.get(kind, 0)
        self.points[kind] = count + 1
        detail = self.faults.get((kind, count))
        if detail is not None:
            fault = Fault(kind, count, detail)
            self.injected.append(fault)
            if process is not None:
                self.disturbed.add(process.pid)
            self.log(f"fault {fault} in {process.name if process else 'nobody'}")
        return detail

    def log(self, text: str) -> None:
        self.trace.append(f"{self.now - EPOCH_S:10.1f}  {text}")


ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EACCES", "EROFS")}


def file_error(name: str, path: object) -> OSError:
    number = ERRORS[name]
    return OSError(number, os.strerror(number), str(path))
