"""From sacct's output to sums by user: time and peak memory of whole processes, over 10^4, 10^5 and 10^6 rows.

    python benchmarks/accounting.py [--rows 10000,100000,1000000] [--rounds 11] [--reportseff PATH]

All contestants get the same rows. hpcjobs checks and types 28 columns of each, folds steps into jobs, derives
efficiencies, energy and cost, and sums by user; the others do less: pandas reads the columns (C engine), polars
scans for the sum of one column by user, reportseff (where it is installed) asks a stand-in for sacct for its 12
columns and prints a line per job. Beyond 10^5 rows it runs once only, against the median of pandas.

Then: a report over 30 days and the same again, where sacct is a stand-in that costs nothing, so the share the
second one takes is an upper bound; and what it costs to start the report command.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness import compete, cpu_ms, machine, report

COLUMNS = (
    *("JobID", "JobIDRaw", "JobName", "User", "Account", "Partition", "QOS", "State", "ExitCode", "Reason"),
    *("Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NTasks", "NCPUS", "ReqMem"),
    *("AllocTRES", "NodeList", "TotalCPU", "MaxRSS", "AveRSS", "TRESUsageInTot", "TRESUsageInAve"),
    "ConsumedEnergyRaw",
)
"""In the order in which hpcjobs asks for them."""
OWN_SEPARATOR = "\x1f\x02\x1d\x07"
"""As `hpcjobs.scheduler.slurm.parse.new_separator` draws one; the other tools read one of a single character."""
GATE_MB = 200
GATE_RATIO = 1.5
DAYS = 30


def generate(path: Path, rows: int, *, separator: str, columns: Sequence[str] = COLUMNS, end: str = "",
             begun: int = 1_795_000_000, longest_s: int = 90_000, step_s: int = 3) -> None:  # fmt: skip
    """Jobs of three rows each: the job, its batch script, one step. ``end``: what comes before the newline."""
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for job in range(1000, 1000 + rows // 3):
            begun += draw.randint(0, step_s)
            for fields in _job(draw, job, begun, longest_s):
                file.write(separator.join(fields[name] for name in columns) + end + "\n")


def _job(draw: random.Random, job: int, submitted: int, longest_s: int) -> Iterator[dict[str, str]]:
    nodes, elapsed, memory = draw.choice([1, 1, 1, 2, 4]), draw.randint(5, longest_s), draw.choice([4, 16, 64]) << 10
    started, cpus = submitted + draw.randint(0, longest_s // 10), 8 * nodes
    state = draw.choice(["COMPLETED", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED by 1000"])
    clock = f"{elapsed // 3600:02d}:{elapsed // 60 % 60:02d}:{elapsed % 60:02d}"
    for suffix, tasks in (("", 0), (".batch", 1), (".0", cpus)):
        is_job = not suffix
        peak = "" if is_job else str(draw.randint(10**6, 10**9))
        usage = (
            "" if is_job else f"cpu=00:00:{draw.randint(10, 59)},energy=0,fs/disk=38416,mem={peak},pages=0,vmem=36901"
        )
        yield {
            "JobID": f"{job}{suffix}", "JobIDRaw": f"{job}{suffix}",
            "JobName": f"train-{draw.randint(0, 500)}" if is_job else suffix[1:],
            "User": f"user{job % 200}" if is_job else "", "Account": "lab", "Partition": "compute" if is_job else "",
            "QOS": "normal" if is_job else "", "State": state if is_job else state.split()[0], "ExitCode": "0:0",
            "Submit": str(submitted), "Eligible": str(submitted), "Start": str(started),
            "End": str(started + elapsed), "ElapsedRaw": str(elapsed), "TimelimitRaw": "1440" if is_job else "",
            "NNodes": str(nodes), "NTasks": str(tasks) if tasks else "", "NCPUS": str(cpus),
            "ReqMem": f"{memory}M" if is_job else "", "AllocTRES": f"cpu={cpus},mem={memory * nodes}M,node={nodes}",
            "NodeList": "tu[01-04]", "MaxRSS": peak, "AveRSS": peak, "TRESUsageInTot": usage, "TRESUsageInAve": usage,
            "TotalCPU": f"{draw.randint(0, 23):02d}:{draw.randint(0, 59):02d}:{draw.randint(0, 59):02d}",
            "ConsumedEnergyRaw": "0", "Reason": "None" if is_job else "", "AdminComment": "", "AllocCPUS": str(cpus),
            "Elapsed": clock, "Timelimit": "1-00:00:00" if is_job else "",
        }  # fmt: skip


def run_hpcjobs(path: str) -> int:
    """The whole way of `hpcjobs report jobs --by user`, from the first byte."""
    from hpcjobs.jobstats.columns import Doubts
    from hpcjobs.jobstats.derive import derive
    from hpcjobs.jobstats.fold import fold, unused_fields
    from hpcjobs.jobstats.sources import frames
    from hpcjobs.jobstats.totals import NEEDED, totals
    from hpcjobs.scheduler.slurm.parse import Table
    from hpcjobs.site.library import load_site

    def blocks() -> Iterator[bytes]:
        with open(path, "rb") as file:
            while block := file.read(5 << 20):
                yield block

    site, doubts = load_site("tu-hpc"), Doubts()
    rows = frames(blocks(), Table(COLUMNS, OWN_SEPARATOR), doubts, without=unused_fields(NEEDED))
    parts = fold(rows, doubts, only=NEEDED)
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
REPORTSEFF = "reportseff"
ITS_COLUMNS = ("AdminComment", "AllocCPUS", "Elapsed", "JobID", "JobIDRaw", "MaxRSS", "NNodes", "NTasks", "ReqMem",
               "State", "Timelimit", "TotalCPU")  # fmt: skip
STAND_IN = """#!/bin/sh
case "$*" in
    *helpformat*) echo {columns} ;;
    *partition*) printf 'PartitionName=compute\\n   MaxTime=2-00:00:00\\n' ;;
    *) exec cat {rows} ;;
esac
"""


class Cost(NamedTuple):
    """Of a process: wall and CPU time, largest memory."""

    wall_ms: float
    cpu_s: float
    peak_mb: float


def cost(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Cost:
    """Of ``argv``, run to its end; its failure is an error."""
    begun = time.perf_counter()
    child = subprocess.Popen(list(argv), env=None if env is None else dict(env), stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{argv} ended with {child.returncode}")
    return Cost((time.perf_counter() - begun) * 1e3, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def contestant(argv: Sequence[str], costs: list[Cost], env: Mapping[str, str] | None = None) -> Callable[[], float]:
    """Wall milliseconds of a process; everything else it cost is appended to ``costs``."""

    def once() -> float:
        costs.append(cost(argv, env))
        return costs[-1].wall_ms

    return once


def stand_in(folder: Path, rows: int) -> dict[str, str]:
    """An environment in which sacct and scontrol answer with generated rows."""
    answer = folder / "reportseff.txt"
    generate(answer, rows, separator="^|^", columns=ITS_COLUMNS, end="^|^")
    for name in ("sacct", "scontrol"):
        (folder / name).write_text(STAND_IN.format(columns=" ".join(ITS_COLUMNS), rows=answer))
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def measure(rows: int, rounds: int, folder: Path, reportseff: str | None) -> bool:
    """One table; whether hpcjobs keeps within the gates (1.5 times the time of pandas, 200 MB)."""
    own_answers, peer_answers = folder / "ours.txt", folder / "peers.txt"
    generate(own_answers, rows, separator=OWN_SEPARATOR)
    generate(peer_answers, rows, separator="\x1f")
    costs: dict[str, list[Cost]] = {name: [] for name in (*CHILDREN, REPORTSEFF)}
    contestants = {}
    for name in CHILDREN:
        path = own_answers if name.startswith("hpcjobs") else peer_answers
        contestants[name] = contestant([sys.executable, __file__, "--child", name, str(path)], costs[name])
    if reportseff is not None:
        argv = [reportseff, "--user", "ana", "--since", "d=7"]
        run_reportseff = contestant(argv, costs[REPORTSEFF], stand_in(folder, rows))
        if rows <= 100_000:
            contestants[REPORTSEFF] = run_reportseff
        else:
            run_reportseff()
    outcome = compete("pandas read (C)", contestants, rounds=rounds, name=str(rows))
    report(
        f"{rows:,} rows of sacct, whole process, wall time (gate: {GATE_RATIO} x pandas read, {GATE_MB} MB)",
        outcome,
        unit="ms",
    )
    peaks = {
        name: max(each.peak_mb for each in costs_of_tool) for name, costs_of_tool in costs.items() if costs_of_tool
    }
    for name, peak in peaks.items():
        least = min(costs[name], key=lambda each: each.cpu_s)
        once = f", once: {least.wall_ms:,.0f} ms" if len(costs[name]) == 1 else ""
        print(f"{name:44} peak memory {peak:6.0f} MB, least CPU time {least.cpu_s:6.2f} s{once}")
    ratio = next(line.ratio for line in outcome.lines if line.name.startswith("hpcjobs"))
    return peaks["hpcjobs report"] <= GATE_MB and (outcome.noisy or rows < 100_000 or ratio <= GATE_RATIO)


def run_days(folder: str) -> int:
    """`hpcjobs report jobs --by user --since 30d`; sacct's rows lie in ``folder``, a file per hour of submission."""
    from hpcjobs.jobstats import totals
    from hpcjobs.jobstats.columns import JobFilter, choose
    from hpcjobs.jobstats.sources import AccountingQuery, Sacct
    from hpcjobs.processes.programs import Result
    from hpcjobs.site.models import Site

    assert choose(" ".join(COLUMNS)) == COLUMNS
    sacct: list[Sacct] = []

    def known(argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        return Result(0, " ".join(COLUMNS), "")

    def answer_from_files(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Iterator[bytes]:
        options = dict(arg.partition("=")[::2] for arg in argv)
        day, _, clock = options["--starttime"].partition("T")
        hours = range(max(0, int(clock[:2]) - 2), 24)  # a job takes an hour and a bit
        files = (Path(folder, f"{day}T{hour:02}") for hour in hours)
        rows = b"".join(file.read_bytes() for file in files if file.exists())
        yield rows.replace(OWN_SEPARATOR.encode(), options["--delimiter"].encode())

    def open_stand_in(job_filter: JobFilter, site: Site) -> Sacct:
        query = AccountingQuery(site.name, job_filter.since, time.time(), None)
        sacct.append(Sacct(query, runner=known, streamer=answer_from_files))
        return sacct[-1]

    setattr(totals, "open_sacct", open_stand_in)  # noqa: B010
    since = time.time() - DAYS * 86400
    count = len(totals.sum_by_group(JobFilter(since=since), by=["user"], site="tu-hpc").jobs)
    print(f"{sacct[0].windows_queried} questions, {count} users", file=sys.stderr)
    return count


def second_report(rows: int, rounds: int, folder: Path) -> None:
    """The same report over 30 days of as many rows each, first without and then with what was kept."""
    from datetime import date, datetime, timedelta

    for back in range(DAYS + 1):
        day = date.today() - timedelta(days=back)
        midnight = int(datetime(day.year, day.month, day.day).timestamp())
        for hour in range(datetime.now().hour - 1 if not back else 24):
            generate(folder / f"{day}T{hour:02}", rows // DAYS // 24, separator=OWN_SEPARATOR, columns=COLUMNS,
                     begun=midnight + 3600 * hour, longest_s=3600, step_s=6)  # fmt: skip
    argv = [sys.executable, __file__, "--child", "days", str(folder)]
    first, second, nothing = [], [], []
    for number in range(rounds):
        env = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache-{number}")}
        first.append(cost(argv, env))
        second.append(cost(argv, env))
        nothing.append(cost([sys.executable, __file__, "--child", "nothing", ""], env))
    print(f"\n{rows:,} rows in {DAYS} days, report twice, sacct's own time left out\n{machine()}")
    for kind, scale in (("wall_ms", 1.0), ("cpu_s", 1e3)):
        base, *costs = (
            statistics.median(getattr(one, kind) for one in runs) * scale for runs in (nothing, first, second)
        )
        net = (costs[1] - base) / (costs[0] - base)
        name = "wall" if kind == "wall_ms" else "CPU"
        print(f"{name}: first {costs[0]:,.0f} ms, second {costs[1]:,.0f} ms, of which imports {base:,.0f} ms:", end=" ")
        print(f"the second takes {net:.1%} of the first beyond that", flush=True)


def run_nothing(path: str) -> int:
    """What every report imports."""
    from hpcjobs.jobstats import totals

    return len(totals.GROUPS)


def cold_start(rounds: int) -> None:
    """CPU time of the report command's help, and of a report that finds nothing, against an empty Python."""
    hpcjobs = [str(Path(sys.executable).with_name("hpcjobs")), "report"]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "HOME": home, "XDG_STATE_HOME": home}
        outcome = compete(
            "python -c pass",
            {
                "python -c pass": lambda: cpu_ms([sys.executable, "-c", "pass"], env=env),
                "hpcjobs report --help": lambda: cpu_ms([*hpcjobs, "--help"], env=env),
                "hpcjobs report jobs, of nobody": lambda: cpu_ms([*hpcjobs, "jobs", "--site", "local"], env=env),
            },
            rounds=rounds,
            name="start",
        )
    report("starting the report command, CPU time", outcome, unit="ms")


CHILDREN_MORE = {"days": run_days, "nothing": run_nothing}


def main() -> None:
    """Print one table per number of rows, then the second report and the cold start; exit 1 when a gate is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10000,100000,1000000")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--reportseff", default=shutil.which(REPORTSEFF), metavar="PATH")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "ARGUMENT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, argument = options.child
        print((CHILDREN | CHILDREN_MORE)[name](argument))
        return
    if options.reportseff is None:
        print("reportseff is not installed: left out")
    sizes = [int(rows) for rows in options.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        held = [measure(rows, options.rounds, Path(folder), options.reportseff) for rows in sizes]
        second_report(max(sizes), min(5, options.rounds), Path(folder))
    cold_start(options.rounds)
    sys.exit(0 if all(held) else 1)


if __name__ == "__main__":
    main()
