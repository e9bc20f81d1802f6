"""What does it cost to hand over a sweep, against submitit's map_array and one sbatch per cell?

    python benchmarks/sweep_submit.py [--site tu-hpc] [--rounds 11] [--cells 100 1000]

Needs a Slurm (``hpcjobs sandbox up --like tu-hpc``). All jobs are held and cancelled. Counts come first:
submit RPCs, from sdiag. One sbatch per cell is measured for 20 cells and shown per cell.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import tempfile
from pathlib import Path

from harness import compete, report, wall_ms

import hpcjobs

LOOP = 20


def _submit_rpcs() -> int:
    out = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REQUEST_SUBMIT_BATCH_JOB\s.*count:(\d+)", out)
    return int(match[1]) if match else 0


def _clear() -> None:
    subprocess.run(["scancel", "--me"], check=True)


def main() -> None:
    """Print a table for each number of cells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", default="tu-hpc")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cells", type=int, nargs="+", default=[100, 1000])
    options = parser.parse_args()
    site, names = hpcjobs.load_site(options.site), itertools.count()
    if site.slurm_conf:
        os.environ["SLURM_CONF"] = site.slurm_conf
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        os.chdir(folder)
        executor = hpcjobs.executor(site=site, folder="submitit", time="1m", hold=True)
        hpcjobs.submit(hpcjobs.plan(["true"], site=site, time="1m", hold=True))
        sbatch = ["sbatch", "--parsable", str(next(Path("runs").glob("true-*/job.sh")))]

        def ours(cells: int) -> float:
            def submit() -> None:
                points = hpcjobs.grid(i=range(cells))
                name = f"sweep{next(names)}"
                hpcjobs.sweep("true", points, site=site, name=name, time="1m", hold=True).submit()

            cost = wall_ms(submit)
            _clear()
            return cost

        def theirs(cells: int) -> float:
            cost = wall_ms(lambda: executor.map_array(abs, range(cells)))
            _clear()
            return cost

        def loop() -> float:
            cost = wall_ms(lambda: [subprocess.run(sbatch, check=True, stdout=subprocess.DEVNULL) for _ in range(LOOP)])
            _clear()
            return cost

        for cells in options.cells:
            before = _submit_rpcs()
            ours(cells)
            print(f"{cells} cells: {_submit_rpcs() - before} submit RPCs")
            contestants = {"hpcjobs sweep": lambda n=cells: ours(n), f"{LOOP} x sbatch": loop}
            if cells < 1000:  # submitit makes one array, whatever the cluster allows
                contestants["submitit map_array"] = lambda n=cells: theirs(n)
            report(f"{cells} cells", compete("hpcjobs sweep", contestants, rounds=options.rounds), unit="ms")


if __name__ == "__main__":
    main()
