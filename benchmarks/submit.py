"""What does a submission cost against bare sbatch, from the command line and from Python?

    python benchmarks/submit.py [--site tu-hpc] [--rounds 11]

Needs a Slurm (``hpcjobs sandbox up --like tu-hpc``). Each contestant hands over a held job that does nothing;
all jobs are cancelled at the end. Counts come first: submit RPCs per job, read from sdiag. Peers are found on PATH, and
those missing are named; torchx and HPC-launcher cannot hand over a held job, so they only show what they would.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness import compete, cpu_ms, report, wall_ms

import hpcjobs

BY_SUBMITIT = """
import submitit
executor = submitit.AutoExecutor("logs", cluster="slurm")
executor.update_parameters(timeout_min=1, slurm_additional_parameters={"hold": True})
executor.submit(print)
"""
DRY_RUNS = {
    "torchx": ("run", "--dryrun", "--scheduler", "slurm", "utils.echo", "--msg", "hi"),
    "launch": ("--dry-run", "--scheduler", "slurm", "-N", "1", "-n", "1", "--gpus-per-proc", "0", "true"),
}


def _submit_rpcs() -> int:
    out = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REQUEST_SUBMIT_BATCH_JOB\s.*count:(\d+)", out)
    return int(match[1]) if match else 0


def _in_process(site: str, folder: Path) -> Callable[[], float]:
    def once() -> float:
        plan = hpcjobs.plan(["true"], site=site, chdir=folder, time="1m", hold=True)
        return wall_ms(lambda: hpcjobs.submit(plan))

    return once


def _dry_runs(folder: str) -> dict[str, Callable[[], float]]:
    programs = {peer: path for peer in DRY_RUNS if (path := shutil.which(peer))}
    if missing := DRY_RUNS.keys() - programs.keys():
        print(f"not installed here, so not measured: {', '.join(sorted(missing))}")
    return {f"{peer}, dry run": partial(cpu_ms, [path, *DRY_RUNS[peer]], cwd=folder) for peer, path in programs.items()}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", default="tu-hpc")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    site = hpcjobs.load_site(options.site)
    if site.slurm_conf:
        os.environ["SLURM_CONF"] = site.slurm_conf
    python, cli = sys.executable, str(Path(sys.executable).parent / "hpcjobs")
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        hpcjobs.submit(hpcjobs.plan(["true"], site=site, chdir=folder, time="1m", hold=True))
        script = str(next(folder.glob("runs/*/job.sh")))
        sbatch = ["sbatch", "--parsable", "--hold", script]
        outcome = compete(
            "python -c pass + sbatch",
            {
                "python -c pass + sbatch": lambda: cpu_ms([python, "-c", "pass"]) + cpu_ms(sbatch),
                "sbatch": lambda: cpu_ms(sbatch),
                "hpcjobs submit": lambda: cpu_ms(
                    [cli, "submit", "-s", options.site, "-t", "1m", "-o", "hold", "true"], cwd=name
                ),
                "hpcjobs submit --dry-run": lambda: cpu_ms(
                    [cli, "submit", "-s", options.site, "--dry-run", "true"], cwd=name
                ),
                "submitit": lambda: cpu_ms([python, "-c", BY_SUBMITIT], cwd=name),
                **_dry_runs(name),
            },
            rounds=options.rounds,
        )
        report("Submit from the command line, CPU time (gate 8, goal 4)", outcome, unit="ms")
        api = compete(
            "sbatch",
            {
                "sbatch": lambda: wall_ms(lambda: subprocess.run(sbatch, check=True, stdout=subprocess.DEVNULL)),
                "hpcjobs.submit(plan)": _in_process(options.site, folder),
            },
            rounds=options.rounds,
        )
        report("Submit from Python, wall time (goal 1.2)", api, unit="ms")
        before = _submit_rpcs()
        hpcjobs.submit(hpcjobs.plan(["true"], site=site, chdir=folder, time="1m", hold=True))
        print(f"submit RPCs per job: {_submit_rpcs() - before} (gate: 1)")
        subprocess.run(["scancel", "--me", "--state=PENDING"], check=True)


if __name__ == "__main__":
    main()
