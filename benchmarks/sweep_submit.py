"""What does it cost to hand over a sweep, against submitit's map_array and one sbatch per cell?

    python benchmarks/sweep_submit.py [--site tu-hpc] [--rounds 11] [--cells 100 1000 10000]

Needs a Slurm (``hpcjobs sandbox up --like tu-hpc``). All jobs are held and cancelled. Counts come first: submit
RPCs, from sdiag. Of one sbatch per cell 20 are measured. submitit makes one array whatever the cluster allows, so
it is called once per 1,000 cells. At the end: how time and peak memory of a fresh process grow with the cells.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import compete, report, wall_ms

import hpcjobs

LOOP = 20
AN_ARRAY = 1000
ONE_SWEEP = """
import resource, sys, time
import hpcjobs
site, cells = sys.argv[1], int(sys.argv[2])
began = time.perf_counter()
hpcjobs.sweep("true", hpcjobs.grid(i=range(cells)), site=site, name=f"grows{cells}", time="1m", hold=True).submit()
cost = time.perf_counter() - began
print(1000 * cost, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def _submit_rpcs() -> int:
    out = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REQUEST_SUBMIT_BATCH_JOB\s.*count:(\d+)", out)
    return int(match[1]) if match else 0


def _clear() -> None:
    subprocess.run(["scancel", "--me"], check=True)


def grows(site: str, numbers: list[int]) -> None:
    """A line for each number of cells, each in a process of its own."""
    print(f"{'cells':>8} {'ms':>8} {'us a cell':>10} {'peak MB':>8}")
    for cells in numbers:
        arguments = [sys.executable, "-c", ONE_SWEEP, site, str(cells)]
        cost_ms, peak_mb = map(
            float, subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split()
        )
        print(f"{cells:>8} {cost_ms:>8.0f} {1000 * cost_ms / cells:>10.1f} {peak_mb:>8.0f}")
        _clear()


def main() -> None:
    """Print a table for each number of cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", default="tu-hpc")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 1000, 10_000])
    options = parser.parse_args()
    site, names = hpcjobs.load_site(options.site), itertools.count()
    if site.slurm_conf:
        os.environ["SLURM_CONF"] = site.slurm_conf
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.chdir(folder)
        executor = hpcjobs.executor(site=site, folder="submitit", time="1m", hold=True)
        hpcjobs.submit(hpcjobs.plan(["true"], site=site, time="1m", hold=True))
        sbatch = ["sbatch", "--parsable", str(next(Path("runs").glob("true-*/job.sh")))]

        def submit_by_hpcjobs(cells: int) -> float:
            def submit() -> None:
                points = hpcjobs.grid(i=range(cells))
                name = f"sweep{next(names)}"
                hpcjobs.sweep("true", points, site=site, name=name, time="1m", hold=True).submit()

            cost = wall_ms(submit)
            _clear()
            return cost

        def submit_by_submitit(cells: int) -> float:
            arrays = [range(first, min(first + AN_ARRAY, cells)) for first in range(0, cells, AN_ARRAY)]
            cost = wall_ms(lambda: [executor.map_array(abs, array) for array in arrays])
            _clear()
            return cost

        def submit_by_loop() -> float:
            cost = wall_ms(lambda: [subprocess.run(sbatch, check=True, stdout=subprocess.DEVNULL) for _ in range(LOOP)])
            _clear()
            return cost

        for cells in options.cells:
            before = _submit_rpcs()
            submit_by_hpcjobs(cells)
            print(f"{cells} cells: {_submit_rpcs() - before} submit RPCs")
            contestants: dict[str, Callable[[], float]] = {
                "hpcjobs sweep": partial(submit_by_hpcjobs, cells),
                f"{LOOP} x sbatch": submit_by_loop,
                "submitit map_array": partial(submit_by_submitit, cells),
            }
            report(f"{cells} cells", compete("hpcjobs sweep", contestants, rounds=options.rounds), unit="ms")
        grows(site.name, options.cells)


if __name__ == "__main__":
    main()
