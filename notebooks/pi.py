"""Pi by throwing darts, on any number of ranks: no network, no library, and a ``summary.json`` for the reports.

python pi.py DARTS
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from hpcjobs.record.summary import RunSummary, Throughput


def main(darts: int) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_dir = Path(os.environ["HPCJOBS_RUN_DIR"])
    begun = time.perf_counter()
    hits = throw(darts // world, random.Random(rank))
    told = run_dir / f"darts-{rank}.json"
    told.with_suffix(".part").write_text(json.dumps([hits, time.perf_counter() - begun]))
    told.with_suffix(".part").rename(told)
    if rank == 0:
        gather(run_dir, darts // world * world, world)


def throw(darts: int, dice: random.Random) -> int:
    """How many of ``darts`` hit the quarter circle."""
    return sum(dice.random() ** 2 + dice.random() ** 2 < 1 for _ in range(darts))


def gather(run_dir: Path, darts: int, world: int) -> None:
    """Wait for all ranks; the slowest one's time is the run's."""
    files = [run_dir / f"darts-{rank}.json" for rank in range(world)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    hits, seconds = zip(*(json.loads(file.read_text()) for file in files), strict=True)
    rate = Throughput(darts / max(seconds), "darts/s")
    print(f"pi is about {4 * sum(hits) / darts:.4f}; {rate.value:,.0f} darts/s on {world} ranks")
    done = RunSummary(
        trainer="pi", strategy="none", workload="darts", status="completed", exit_code=0, world_size=world,
        throughput=rate, samples=darts, elapsed_s=max(seconds),
    )  # fmt: skip
    done.write(run_dir)


if __name__ == "__main__":
    main(int(sys.argv[1]))
