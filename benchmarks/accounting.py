"""From sacct's output to sums by user: time and peak memory of whole processes, over 10^4, 10^5 and 10^6 rows.

    python benchmarks/accounting.py [--rows 10000,100000,1000000] [--rounds 11]

All contestants read the same rows with the same 28 columns. hpcjobs checks and types each row, folds steps into
jobs, derives efficiencies, energy and cost, and sums by user; the others do less: pandas reads the columns (C
engine), polars scans for the sum of one column by user. reportseff asks sacct itself and takes no file, so it is
left out.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import compete, report

COLUMNS = (
    *("JobID", "JobIDRaw", "JobName", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Submit"),
    *("Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NTasks", "NCPUS", "ReqMem", "AllocTRES"),
    *("NodeList", "TotalCPU", "MaxRSS", "AveRSS", "TRESUsageInTot", "TRESUsageInAve", "ConsumedEnergyRaw", "Reason"),
)
OURS = "\x1f\x02\x1d\x07"
"""As `hpcjobs.report.rows.new_separator` draws one; the peers read one of a single character."""
GATE_MB = 250


def generate(path: Path, rows: int, *, separator: str) -> None:
    """Jobs of three rows each: the job, its batch script, one step."""
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        submitted = 1_795_000_000
        for job in range(1000, 1000 + rows // 3):
            submitted += draw.randint(0, 3)
            for fields in _job(draw, job, submitted):
                file.write(separator.join(fields) + "\n")


def _job(draw: random.Random, job: int, submitted: int) -> Iterator[list[str]]:
    nodes, elapsed, memory = draw.choice([1, 1, 1, 2, 4]), draw.randint(5, 90000), draw.choice([4, 16, 64]) << 10
    started, cpus = submitted + draw.randint(0, 9000), 8 * nodes
    state = draw.choice(["COMPLETED", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED by 1000"])
    times = [str(v) for v in (submitted, submitted, started, started + elapsed, elapsed)]
    for suffix, tasks in (("", 0), (".batch", 1), (".0", cpus)):
        whole = not suffix
        peak = "" if whole else str(draw.randint(10**6, 10**9))
        usage = (
            "" if whole else f"cpu=00:00:{draw.randint(10, 59)},energy=0,fs/disk=38416,mem={peak},pages=0,vmem=36901"
        )
        name = f"train-{draw.randint(0, 500)}" if whole else suffix[1:]
        yield [
            f"{job}{suffix}", f"{job}{suffix}", name, f"user{job % 200}" if whole else "", "lab",
            "compute" if whole else "", "normal" if whole else "", state if whole else state.split()[0], "0:0", *times,
            "1440" if whole else "", str(nodes), str(tasks) if tasks else "", str(cpus), f"{memory}M" if whole else "",
            f"cpu={cpus},mem={memory * nodes}M,node={nodes}", "tu[01-04]",
            f"{draw.randint(0, 23):02d}:{draw.randint(0, 59):02d}:{draw.randint(0, 59):02d}", peak, peak, usage, usage,
            "0", "None" if whole else "",
        ]  # fmt: skip


def run_hpcjobs(path: str) -> int:
    """The whole way of `hpcjobs report jobs --by user`, from the first byte."""
    from hpcjobs.report.derive import derive
    from hpcjobs.report.fold import fold
    from hpcjobs.report.rows import Doubts, frames
    from hpcjobs.report.totals import totals
    from hpcjobs.site.library import load_site

    def blocks() -> Iterator[bytes]:
        with open(path, "rb") as file:
            while block := file.read(4 << 20):
                yield block

    site, doubts = load_site("tu-hpc"), Doubts()
    parts = fold(frames(blocks(), COLUMNS, separator=OURS, doubts=doubts), doubts)
    return len(totals((derive(part, site) for part in parts), by="user"))


def run_pandas(path: str) -> int:
    import pandas as pd

    return len(pd.read_csv(path, sep="\x1f", header=None, names=list(COLUMNS), quoting=3, engine="c"))


def run_polars(path: str) -> int:
    import polars as pl

    rows = pl.scan_csv(
        path, separator="\x1f", has_header=False, new_columns=list(COLUMNS), quote_char=None, infer_schema=False
    )
    jobs = rows.filter(~pl.col("JobID").str.contains(".", literal=True))
    return len(jobs.group_by("User").agg(pl.col("ElapsedRaw").cast(pl.Int64).sum()).collect())


CHILDREN = {"hpcjobs report": run_hpcjobs, "pandas read (C)": run_pandas, "polars scan": run_polars}


def process(name: str, path: Path, peaks: dict[str, float], cpu: dict[str, float]) -> Callable[[], float]:
    """A contestant: wall milliseconds of one process; its peak memory (MB) and CPU time go into the dictionaries."""

    def once() -> float:
        begun = time.perf_counter()
        child = subprocess.Popen([sys.executable, __file__, "--child", name, str(path)], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{name} ended with {child.returncode}")
        peaks[name] = max(peaks.get(name, 0.0), used.ru_maxrss / 1024)
        cpu[name] = min(cpu.get(name, float("inf")), used.ru_utime + used.ru_stime)
        return (time.perf_counter() - begun) * 1e3

    return once


def measure(rows: int, rounds: int, folder: Path) -> bool:
    """One table; whether ours keeps within the gates (time of pandas, 250 MB)."""
    ours, peers = folder / "ours.txt", folder / "peers.txt"
    generate(ours, rows, separator=OURS)
    generate(peers, rows, separator="\x1f")
    peaks: dict[str, float] = {}
    cpu: dict[str, float] = {}
    contestants = {name: process(name, ours if name.startswith("hpcjobs") else peers, peaks, cpu) for name in CHILDREN}
    outcome = compete("pandas read (C)", contestants, rounds=rounds)
    report(f"{rows:,} rows of sacct, whole process, wall time (gate: pandas read, {GATE_MB} MB)", outcome, unit="ms")
    for name in contestants:
        print(f"{name:44} peak memory {peaks[name]:6.0f} MB, least CPU time {cpu[name]:6.2f} s")
    ratio = next(line.ratio for line in outcome.lines if line.name.startswith("hpcjobs"))
    return peaks["hpcjobs report"] <= GATE_MB and (outcome.noisy or rows < 100_000 or ratio <= 1)


def main() -> None:
    """Print one table per number of rows; exit 1 when a gate is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, path = options.child
        print(CHILDREN[name](path))
        return
    with tempfile.TemporaryDirectory() as folder:
        held = [measure(int(rows), options.rounds, Path(folder)) for rows in options.rows.split(",")]
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
