"""Lives of jobs in a simulated Slurm, with faults from seeds; a failing one is shortened, and its command printed.

python tests/simulation/simulate.py --seeds 0-999999     many
python tests/simulation/simulate.py --seed 17            one, with its trace
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import life
import world
from case_life import CaseLife
from life import FederationLife, Life, Schedule
from queue_life import QueueLife
from sweep_life import SweepLife
from world import Fault

LIVES: dict[str, type[Life]] = {
    "jobs": Life, "cases": CaseLife, "sweeps": SweepLife, "queue": QueueLife, "federation": FederationLife,
}  # fmt: skip


class Failure(NamedTuple):
    """A schedule in which something did not hold."""

    schedule: Schedule
    errors: list[str]
    trace: list[str]


def place() -> Path:
    """A folder of this process's own, in memory where there is such."""
    shared = Path("/dev/shm")
    return (
        shared if os.access(shared, os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))
    ) / f"hpcjobs-sim-{os.getpid()}"


def play(schedule: Schedule, folder: Path) -> Life:
    """Raises RuntimeError: a checker, or the simulated cluster, ended with an error of its own."""
    try:
        return life.run(schedule, folder, of=LIVES[schedule.lives])
    except Exception as error:
        raise RuntimeError(f"crashed in: {command(schedule)}") from error


def fails(schedule: Schedule, folder: Path) -> list[str]:
    return play(schedule, folder).errors


def minimise(schedule: Schedule, folder: Path) -> Schedule:
    """The schedule with as few faults as still fail in the same way."""
    kind = _kind(fails(schedule, folder))
    faults = list(schedule.faults)
    for fault in list(faults):
        fewer = schedule._replace(faults=tuple(one for one in faults if one is not fault))
        if _kind(fails(fewer, folder)) & kind:
            faults.remove(fault)
    return schedule._replace(faults=tuple(faults))


def _kind(errors: Iterable[str]) -> set[str]:
    """Errors without numbers and names."""
    return {"".join(c for c in error.rpartition("/")[2] if not c.isdigit()) for error in errors}


def play_range(first: int, count: int, lives: str = "jobs") -> tuple[int, list[Failure], float]:
    """Seeds one after the other: how many, those that fail, and the seconds of processor time."""
    folder, began = place(), time.process_time()
    failures = []
    for seed in range(first, first + count):
        schedule = Schedule(seed, life.draw_faults(seed), lives)
        done = play(schedule, folder)
        if done.errors:
            failures.append(Failure(schedule, done.errors, done.world.trace))
    life.seams.clear(folder)
    return count, failures, time.process_time() - began


def command(schedule: Schedule) -> str:
    lives = "" if schedule.lives == "jobs" else f" --lives {schedule.lives}"
    return f".venv/bin/python -W ignore tests/simulation/simulate.py --seed {schedule.seed}{lives}"


def describe(failure: Failure, *, trace: int = 60) -> str:
    faults = " ".join(map(str, failure.schedule.faults)) or "none"
    lines = [*(failure.errors or ["nothing failed"]), f"faults: {faults}"]
    lines.append(f"replay: {command(failure.schedule)} --faults {faults!r}")
    events = _shorten(failure.trace)
    if len(events) > trace:
        lines.append(f"the last {trace} of {len(events)} lines; the command above prints all:")
    return "\n".join([*lines, *events[-trace:]])


def _shorten(trace: list[str]) -> list[str]:
    """A trace in which a line that is repeated, at later times, is there once."""
    groups = [list(group) for _, group in itertools.groupby(trace, key=lambda line: line[10:])]
    return [group[0] + (f"  ({len(group)} times)" if len(group) > 1 else "") for group in groups]


def _seeds(text: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    seeds = range(int(match[1]), int(match[2] or match[1]) + 1) if match is not None else range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds such as 0-999")
    return seeds


def _faults(text: str) -> tuple[Fault, ...]:
    faults = []
    for part in text.split() if text != "none" else []:
        name, _, rest = part.partition("@")
        at, _, detail = rest.partition(":")
        faults.append(Fault(name, int(at), detail))
    return tuple(faults)


def _play_to_first(seeds: range, lives: str) -> int:
    for seed in seeds:
        _, failures, _ = play_range(seed, 1, lives)
        if failures:
            print(f"seed {seed}: {failures[0].errors[0].rpartition('/')[2]}")
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=_seeds, default="0-999", help="play these, the last included (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="play this one, and print what happened in it")
    parser.add_argument("--faults", help="with --seed: these faults instead of its own, as a failure prints them")
    parser.add_argument("--lives", choices=LIVES, default="jobs", help="what is played (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--most", type=int, default=5, help="print so many failures")
    parser.add_argument("--first", action="store_true", help="end at the first schedule that fails")
    given = parser.parse_args()
    if given.seed is not None:
        faults = life.draw_faults(given.seed) if given.faults is None else _faults(given.faults)
        schedule = Schedule(given.seed, faults, given.lives)
        done = play(schedule, place())
        print(describe(Failure(schedule, done.errors, done.world.trace), trace=10_000))
        for seen in done.seen:
            r = seen.record
            print(f"{seen.when - world.EPOCH_S:10.1f}  {seen.who} showed {r.job_id} as {r.state.value} ({r.source})")
        life.seams.clear(place())
        return bool(done.errors)
    seeds: range = given.seeds
    if given.first:
        return _play_to_first(seeds, given.lives)
    portion, began = 200, time.monotonic()
    failures, played, cpu_s = list[Failure](), 0, 0.0
    with ProcessPoolExecutor(given.jobs) as pool:
        starts = range(seeds.start, seeds.stop, portion)
        parts = [(start, min(portion, seeds.stop - start), given.lives) for start in starts]
        for count, failed, used in pool.map(play_range, *zip(*parts, strict=True)):
            played, cpu_s = played + count, cpu_s + used
            failures += failed
    elapsed = time.monotonic() - began
    print(f"{played} schedules in {elapsed:.0f} s ({played / elapsed:.0f} a second), {len(failures)} failed")
    kinds: dict[str, list[Failure]] = {}
    for failure in failures:
        for kind in _kind(failure.errors):
            kinds.setdefault(kind, []).append(failure)
    for kind, members in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"{len(members):5d}  {kind}  seeds {[failure.schedule.seed for failure in members[:8]]}")
    chosen = {min(members, key=lambda one: len(one.schedule.faults)).schedule for members in kinds.values()}
    for schedule in sorted(chosen)[: given.most]:
        small = minimise(schedule, place())
        done = play(small, place())
        print("\n" + describe(Failure(small, done.errors, done.world.trace)))
    life.seams.clear(place())
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
