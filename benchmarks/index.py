"""What does ``hpcjobs ps`` cost, in CPU time, as the list of jobs grows?

    python benchmarks/index.py [--jobs 10000] [--newest 50] [--rounds 11]

Contestants: nothing submitted yet; the newest jobs of the last day alone; the same behind ended jobs of earlier days.
All have run folders with the files that a finished job leaves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from harness import compete, cpu_ms, report

from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, State


def fill(home: Path, *, ended: int, newest: int) -> None:
    """A home with jobs of earlier days, and of the last hour; all have ended and are accounted for."""
    os.environ["XDG_STATE_HOME"] = str(home / "state")
    now = time.time()
    lines = []
    for number in range(ended + newest):
        old = number < ended
        folder = home / "runs" / f"train-{number:08x}"
        folder.mkdir(parents=True)
        submitted = now - (200_000 - number if old else 3600)
        job_id = f"L{number + 1}"
        entry = Entry(job_id, "train", "local", "local", str(folder), submitted, cluster=os.uname().nodename)
        state = {"job_id": job_id, "state": "COMPLETED", "exit_code": 0, "started": 1, "ended": 2, "nodes": "n1"}
        (folder / "state.json").write_bytes(msgspec.json.encode(state))
        record = JobRecord(job_id, State.COMPLETED, "local", name="train", submitted=submitted, ended=submitted + 1)
        (folder / "accounting.json").write_bytes(msgspec.json.encode([record]))
        lines.append(entry)
    for entry in lines[:1]:
        index.add(entry)  # makes the folder
    log = index.index_dir() / f"{os.uname().nodename}.jsonl"
    if lines:
        log.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in lines))
    index.close(lines[:ended])


def _cost(argv: list[str], env: dict[str, str]) -> Callable[[], float]:
    return lambda: cpu_ms(argv, env=env)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--newest", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    hpcjobs = shutil.which("hpcjobs", path=str(Path(sys.executable).parent))
    assert hpcjobs is not None
    with tempfile.TemporaryDirectory() as name:
        sizes = {"empty": (0, 0), f"{options.newest} of today": (0, options.newest)}
        sizes[f"{options.newest} of today, {options.jobs} ended"] = (options.jobs, options.newest)
        contestants: dict[str, Callable[[], float]] = {}
        for number, (label, (ended, newest)) in enumerate(sizes.items()):
            home = Path(name) / str(number)
            home.mkdir()
            fill(home, ended=ended, newest=newest)
            env = os.environ | {"XDG_STATE_HOME": str(home / "state"), "HPCJOBS_SITE": "local"}
            contestants[label] = _cost([hpcjobs, "ps", "--json"], env)
        outcome = compete("empty", contestants, rounds=options.rounds)
    report("hpcjobs ps, CPU time (gate: under 2 with 10,000 ended jobs)", outcome, unit="ms")


if __name__ == "__main__":
    main()
