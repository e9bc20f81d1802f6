"""All-reduce by size: MPI, Horovod over MPI and over Gloo, and torch over gloo, as ratios to the best of the round.

Each contestant is a launch of its own by mpirun, since Horovod cannot change what it runs over; a round starts all of
them, in a shuffled order. RANKS="2 4" and ROUNDS say how many.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from harness import RESULTS, machine, parse_no_arguments

RANKS = [int(count) for count in os.environ.get("RANKS", "2 4").split()]
ROUNDS = int(os.environ.get("ROUNDS", "11"))
MOST = os.environ.get("MOST", "64M")
CONTESTANTS = {
    "MPI": ("mpi", {}),
    "Horovod MPI": ("horovod", {"HOROVOD_CONTROLLER": "mpi"}),
    "Horovod Gloo": ("horovod", {"HOROVOD_CONTROLLER": "gloo"}),
    "torch gloo": ("group", {}),
}


def main() -> None:
    parse_no_arguments(__doc__)
    lacking = [name for name in ("mpi4py", "horovod") if find_spec(name) is None]
    if shutil.which("mpirun") is None or lacking:
        print(f"not run: it needs mpirun, mpi4py and Horovod ({', '.join(lacking) or 'no mpirun'})")
        return
    for ranks in RANKS:
        report(ranks, [one_round(ranks, random.Random(number)) for number in range(ROUNDS)])


def one_round(ranks: int, order: random.Random) -> dict[str, dict[int, float]]:
    """Seconds by size for each contestant."""
    names = list(CONTESTANTS)
    order.shuffle(names)
    return {name: launch(name, ranks) for name in names}


def launch(name: str, ranks: int) -> dict[int, float]:
    over, settings = CONTESTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        env = {**os.environ, **settings, "MASTER_PORT": "23461", "OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "0.1"}
        mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks))
        arguments = ("-m", "hpcjobs.trainers.measure", "--over", over, "--most", MOST, "--json", str(figures))
        subprocess.run([*mpirun, sys.executable, *arguments], env=env, check=True, stdout=subprocess.DEVNULL)
        return {int(point["bytes"]): point["seconds"] for point in json.loads(figures.read_text())["allreduce"]}


def report(ranks: int, rounds: list[dict[str, dict[int, float]]]) -> None:
    print(f"\nall-reduce over {ranks} ranks of this machine, {len(rounds)} rounds\n{machine()}")
    print(f"{'bytes':>12} {'best, µs':>10}  " + "".join(f"{name:>14}" for name in CONTESTANTS))
    for size in rounds[0]["MPI"]:
        best = [min(figures[size] for figures in done.values()) for done in rounds]
        ratios = [
            statistics.median(done[name][size] / least for done, least in zip(rounds, best, strict=True))
            for name in CONTESTANTS
        ]
        row = "".join(f"{ratio:>14.2f}" for ratio in ratios)
        print(f"{size:>12,} {1e6 * statistics.median(best):>10.1f}  {row}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    samples = [{name: {str(size): s for size, s in f.items()} for name, f in done.items()} for done in rounds]
    (RESULTS / f"allreduce-{ranks}.json").write_text(json.dumps({"machine": machine(), "rounds": samples}, indent=1))


if __name__ == "__main__":
    main()
