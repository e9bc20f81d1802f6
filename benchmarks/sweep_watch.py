"""How often is the scheduler asked while a sweep is watched, against submitit?

    python benchmarks/sweep_watch.py [--site tu-hpc] [--cells 20] [--seconds 30]

Needs a Slurm. Each watches its own held array for the same time; what counts is queries that reached the
controller (squeue, scontrol) or the accounting (sacct), noted by wrappers on PATH.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import hpcjobs

ASKING = ("squeue", "sacct", "scontrol")


def _count_calls(folder: Path) -> Path:
    """Put wrappers in front of Slurm's commands; the file that gets a line per call."""
    calls = folder / "calls"
    calls.touch()
    for command in ASKING:
        wrapper = folder / command
        wrapper.write_text(f'#!/bin/sh\necho {command} >>{calls}\nexec {shutil.which(command)} "$@"\n')
        wrapper.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return calls


def main() -> None:
    """Print queries per hour for both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", default="tu-hpc")
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    site = hpcjobs.load_site(options.site)
    if site.slurm_conf:
        os.environ["SLURM_CONF"] = site.slurm_conf
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        os.chdir(name)
        sweep = hpcjobs.sweep("true", hpcjobs.grid(i=range(options.cells)), site=site, time="1m", hold=True)
        sweep.submit()
        executor = hpcjobs.executor(site=site, folder="submitit", time="1m", hold=True)
        (Path(name) / "bin").mkdir()
        calls = _count_calls(Path(name) / "bin")

        def count_calls() -> Counter[str]:
            return Counter(calls.read_text().split())

        with suppress(TimeoutError):
            sweep.wait(timeout_s=options.seconds)
        hpcjobs_calls = count_calls()
        jobs = executor.map_array(abs, range(options.cells))
        end = threading.Event()
        watcher = threading.Thread(target=lambda: [job.done() or end.wait(1 / len(jobs)) for job in _around(jobs, end)])
        watcher.start()
        time.sleep(options.seconds)
        end.set()
        watcher.join()
        submitit_calls = count_calls() - hpcjobs_calls
        sweep.cancel()
        subprocess.run(["scancel", jobs[0].job_id.split("_")[0]], check=True)
        print(f"{options.cells} cells watched for {options.seconds:g} s")
        for name_of_tool, calls_of_tool in (("hpcjobs", hpcjobs_calls), ("submitit", submitit_calls)):
            print(f"  {name_of_tool:8} {calls_of_tool.total():4}  {dict(calls_of_tool)}")
        print(f"ratio {hpcjobs_calls.total() / max(1, submitit_calls.total()):.2f}")


def _around(jobs, end):  # type: ignore[no-untyped-def]
    while not end.is_set():
        yield from jobs


if __name__ == "__main__":
    main()
