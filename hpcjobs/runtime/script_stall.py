"""A script's signs of life, from which a watchdog sees that nothing moves any more, and the report of what it does."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.watchdog import FOLDER, Watchdog, describe_position, write_report

BEATS = 1000
"""So many of the newest times between signs of life decide how long a rank may stand still."""


class Heartbeat:
    """Ends the run with code 19 once no rank shows signs of life; the watchdog's `Ranks` and `StepTimes`.

    Ranks have met nowhere that this process knows of: each notes its host in the run folder for the others.
    """

    def __init__(self, env: DistEnv, run_dir: Path, *, after_s: float | None) -> None:
        self._env, self._folder = env, run_dir / FOLDER
        self._between: deque[float] = deque(maxlen=BEATS)
        self._last: float | None = None
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"host-{env.rank}").write_text(own_host(), encoding="utf-8")
        self._watchdog = Watchdog(self, run_dir, self, after_s=after_s, on=True)

    def beat(self, step: int) -> None:
        """Record a sign of life, after `step` finished steps."""
        now = time.perf_counter()
        if self._last is not None:
            self._between.append(now - self._last)
        self._last = now
        self._watchdog.beat(step, "step")

    def update_limit(self) -> None:
        self._watchdog.update_limit()

    def suspend(self) -> AbstractContextManager[None]:
        """Inside, a rank may stand still."""
        return self._watchdog.suspend()

    def close(self) -> None:
        self._watchdog.close()

    @property
    def rank(self) -> int:
        return self._env.rank

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._read_host(rank) for rank in range(self._env.world_size))

    @property
    def step_s(self) -> Sequence[float]:
        return self._between

    @property
    def recent_steps(self) -> Sequence[float]:
        return tuple(self._between)

    def _read_host(self, rank: int) -> str:
        try:
            return (self._folder / f"host-{rank}").read_text(encoding="utf-8")
        except OSError:  # that rank has not called watch() yet
            return "an unknown host"


def report_stacks(run_dir: Path, *, rank: int, step: int) -> Path:
    """Write stacks and last collectives of this rank, as they are now. The file."""
    main_thread = threading.main_thread().ident or 0
    return write_report(run_dir / FOLDER, rank=rank, host=own_host(), step=step, line=describe_position(main_thread))


def own_host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
