"""Ends a stalled run, and names the rank that is behind.

Every rank watches its steps. If they stop on one rank they soon stop on all, since each step has a collective. Every
rank then writes its position, the stacks of its threads and its last collectives into `stalled/rank-N.txt`, and all end
with code 19. A rank without a report is stopped, or its node is gone.

Time for which Slurm had suspended the job does not count. A rank that continues while the reports are gathered removes
its report.

The last collectives come from torch's flight recorders, of NCCL and of gloo (`TORCH_FR_BUFFER_SIZE` entries, 2000 by
default). A build of torch may lack either, and a program without torch has none. `Heartbeat` watches a script.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hpcjobs.record.summary import Quantiles
from hpcjobs.runtime import signals
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import ExitCode, print_error

BINDINGS = "torch._C._distributed_c10d"
RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
EVERYONE = "default_pg"


@dataclass(frozen=True)
class Collective:
    """A collective call; `number` counts alike on all ranks of the group."""

    number: int
    name: str
    group: str
    shapes: tuple[tuple[int, ...], ...]
    ended: bool
    began_ns: int  # since 1970

    def __str__(self) -> str:
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.number} {self.name}({shapes}) in {self.group}: {'ended' if self.ended else 'not ended'}"


def collectives() -> list[Collective]:
    """List recorded collectives in the order of their begin; empty if torch's recorder is missing or off."""
    bindings = sys.modules.get(BINDINGS)
    entries = [call for name in RECORDERS if (dump := getattr(bindings, name, None)) for call in _read(dump())]
    return sorted(entries, key=lambda call: call.began_ns)


def begun(calls: list[Collective]) -> int:
    """How many collectives of all ranks this one has begun, in each recorder's own count."""
    newest: dict[str, int] = {}
    for call in calls:
        if call.group == EVERYONE:
            backend = call.name.partition(":")[0]
            newest[backend] = max(call.number, newest.get(backend, 0))
    return sum(newest.values())


def _read(dump: bytes) -> list[Collective]:
    entries: list[dict[str, Any]] = json.loads(dump).get("entries", [])
    return [
        Collective(
            number=entry["collective_seq_id"],
            name=entry["profiling_name"],
            group=entry["process_group"][1],
            shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
            ended=entry["retired"],
            began_ns=entry["time_created_ns"],
        )
        for entry in entries
        if not entry["is_p2p"]
    ]


FOLDER = "stalled"
FACTOR, LEAST_S, FIRST_S = 30.0, 300.0, 1800.0
"""Limit in p95 steps, its minimum in seconds, and the limit before the first steps (compilation)."""
MOST_S = 3000.0
"""Without --stall-after never longer than this, so that the verdict comes before a collective's own timeout."""
KNOWN_STEPS = 5
LOOK_S = 0.5
MOST_BETWEEN_LOOKS_S = 2.0
"""More than this between two looks was no time of this process: it was stopped (`scontrol suspend`, a debugger)."""
GATHER_S = 5.0
SHOWN_COLLECTIVES = 20
PHASES = ("data", "probe", "evaluation", "step")
"""Phases after a finished step, in this order; the last one is the next step."""


@dataclass(frozen=True)
class RankPosition:
    """Finished steps, current phase, begun collectives, and the innermost line of the main thread."""

    rank: int
    host: str
    step: int
    phase: str
    collectives: int
    line: str

    @property
    def order(self) -> tuple[int, int, int]:
        return self.step, PHASES.index(self.phase), self.collectives


class Ranks(Protocol):
    """Which rank this is, and the hosts by rank."""

    @property
    def rank(self) -> int: ...

    @property
    def hosts(self) -> tuple[str, ...]: ...


class Watchdog:
    """`beat` at every sign of life; a thread looks at when the last one was."""

    def __init__(
        self, group: Ranks, run_dir: Path, step_s: Callable[[], Sequence[float]], *, after_s: float | None, on: bool
    ) -> None:
        """`step_s` returns the times of the newest steady steps."""
        self.group, self.folder, self.step_s, self.after_s = group, run_dir / FOLDER, step_s, after_s
        self._ran_s = 0.0
        self._step, self._phase, self._when = 0, "data", self._ran_s
        self.limit_s = FIRST_S if after_s is None else after_s
        """Limit without a sign of life."""
        self._suspended = False
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True) if on else None
        if self._thread is not None:
            self._thread.start()

    def beat(self, step: int, phase: str) -> None:
        self._step, self._phase, self._when = step, phase, self._ran_s

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Suspend the watchdog: the last checkpoint has a separate limit."""
        self._suspended = True
        try:
            yield
        finally:
            self._when, self._suspended = self._ran_s, False

    def close(self) -> None:
        self._over.set()

    def update_limit(self) -> None:
        """Derives the limit from the newest steps; called when a line of metrics is written, not while watching."""
        steps = Quantiles.of(self.step_s()) if self.after_s is None else None
        if steps is not None and steps.count >= KNOWN_STEPS:
            self.limit_s = min(MOST_S, max(LEAST_S, FACTOR * steps.p95))

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            self._ran_s += min(now - looked, MOST_BETWEEN_LOOKS_S)
            looked = now
            if not self._suspended and self._ran_s - self._when > self.limit_s:
                self._end_if_confirmed(self._ran_s - self._when)
                looked = time.monotonic()

    def _end_if_confirmed(self, stood_s: float) -> None:
        """End this process, unless it has gone on by the time the other ranks have reported."""
        calls, last_beat = collectives(), self._when
        mine = self._position(begun(calls))
        self._report(mine, calls)
        over = self._over.wait(GATHER_S)  # the others have stood as long as this one, give or take a step
        if over or self._suspended or self._when != last_beat:
            self._withdraw(mine)
            return
        positions = read_reports(self.folder, since=time.time() - GATHER_S - stood_s)
        if mine.rank == min(positions, default=mine.rank):
            arguments, late = describe_stall(positions, self.group.hosts)
            print_error(f"error: no step for {stood_s:.0f} s: {arguments}. Stacks: {self.folder}")
            for host in late:
                signals.suspect(host)
        else:
            time.sleep(LOOK_S)  # a launcher kills all ranks when the first one leaves
        os._exit(ExitCode.STANDSTILL)

    def _position(self, begun: int) -> RankPosition:
        line = describe_position(self._main)
        return RankPosition(self.group.rank, self.group.hosts[self.group.rank], self._step, self._phase, begun, line)

    def _report(self, mine: RankPosition, calls: list[Collective]) -> None:
        try:
            write_position(self.folder, mine, calls)
        except OSError as error:  # ranks may be blocked by this folder: write to the log instead
            print_error(f"rank {mine.rank} can't write its report: {error}; {mine}")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)

    def _withdraw(self, mine: RankPosition) -> None:
        try:
            (self.folder / f"rank-{mine.rank}.txt").unlink(missing_ok=True)
        except OSError as error:
            print_error(f"rank {mine.rank} goes on, and can't remove its report: {error}")


def describe_position(thread: int) -> str:
    """The line that a thread of this process is at: ``train.py:12 in forward``."""
    last = traceback.extract_stack(sys._current_frames()[thread])[-1]
    return f"{Path(last.filename).name}:{last.lineno} in {last.name}"


def write_position(folder: Path, mine: RankPosition, calls: list[Collective]) -> Path:
    """Write the report of a rank, in one step. Raises OSError."""
    folder.mkdir(exist_ok=True)
    beside, path = folder / f".rank-{mine.rank}", folder / f"rank-{mine.rank}.txt"
    with beside.open("w", encoding="utf-8") as file:
        file.write(json.dumps(asdict(mine)) + "\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.writelines(f"collective {call}\n" for call in calls[-SHOWN_COLLECTIVES:])
    return beside.replace(path)


def read_reports(folder: Path, *, since: float) -> dict[int, RankPosition]:
    """Read the reports written since then (seconds since 1970), by rank."""
    positions = {}
    for path in folder.glob("rank-*.txt"):
        if path.stat().st_mtime >= since:
            place = RankPosition(**json.loads(path.read_text(encoding="utf-8").splitlines()[0]))
            positions[place.rank] = place
    return positions


def describe_stall(positions: dict[int, RankPosition], hosts: tuple[str, ...]) -> tuple[str, set[str]]:
    """A message that names the ranks that are behind, and the hosts of these ranks."""
    silent = {rank: host for rank, host in enumerate(hosts) if rank not in positions}
    if silent:
        names = ", ".join(f"rank {rank} on {host}" for rank, host in silent.items())
        return f"{names} says nothing: stopped, or its node is gone", set(silent.values())
    first, last = min(p.order for p in positions.values()), max(p.order for p in positions.values())
    behind = (
        [place for place in positions.values() if place.order == first] if first < last else differing_ranks(positions)
    )
    if not behind:
        return f"all ranks are in {PHASES[first[1]]} {first[0] + 1} alike", set()
    names = ", ".join(
        f"rank {p.rank} on {p.host} (in {p.phase} of step {p.step + 1}, {p.collectives} collectives begun, {p.line})"
        for p in behind
    )
    return f"behind: {names}", {place.host for place in behind}


def differing_ranks(positions: dict[int, RankPosition]) -> list[RankPosition]:
    """Return ranks that differ from the majority; empty without a majority."""
    lines = Counter(place.line for place in positions.values()).most_common()
    if len(lines) < 2 or lines[0][1] == lines[1][1]:
        return []
    return [place for place in positions.values() if place.line != lines[0][0]]


BEATS = 1000
"""The limit is computed from this number of newest times between signs of life."""


class Heartbeat(Watchdog):
    """Ends the run with code 19 once no rank shows signs of life; the watchdog's `Ranks`.

    Ranks have met nowhere that this process knows of: each notes its host in the run folder for the others.
    """

    def __init__(self, env: DistEnv, run_dir: Path, *, after_s: float | None) -> None:
        self._env = env
        self._between: deque[float] = deque(maxlen=BEATS)
        self._last: float | None = None
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        (folder / f"host-{env.rank}").write_text(own_host(), encoding="utf-8")
        super().__init__(self, run_dir, lambda: tuple(self._between), after_s=after_s, on=True)

    def beat(self, step: int, phase: str = "step") -> None:
        """Record a sign of life, after `step` finished steps."""
        now = time.perf_counter()
        if self._last is not None:
            self._between.append(now - self._last)
        self._last = now
        super().beat(step, phase)

    @property
    def rank(self) -> int:
        return self._env.rank

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._read_host(rank) for rank in range(self._env.world_size))

    def _read_host(self, rank: int) -> str:
        try:
            return (self.folder / f"host-{rank}").read_text(encoding="utf-8")
        except OSError:  # that rank has not called watch() yet
            return "an unknown host"


def report_stacks(run_dir: Path, *, rank: int, step: int) -> Path:
    """Write current stacks and last collectives of this rank after `step`. Returns the file."""
    calls, line = collectives(), describe_position(threading.main_thread().ident or 0)
    return write_position(run_dir / FOLDER, RankPosition(rank, own_host(), step, "step", begun(calls), line), calls)


def own_host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
