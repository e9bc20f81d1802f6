"""``report jobs`` of requeued jobs: every attempt counts, also those before ``--since``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from commandline import ok
from sacct_versions import FakeSacct, row, step

SITE = """
partitions: {compute: {nodes: 2, node: {cpus: 8, gpus: 4, mem: 8G}}}
prices: {gpu_hour: 2.0, currency: EUR}
watts: {gpu: 300}
"""
SACCT = """#!{python}
import json, sys
options = {{word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:]}}
rows = json.loads({rows!r})
if "--helpformat" in options:
    print({columns!r})
else:
    for row in rows if "--jobs" in options else [row for row in rows if int(row["End"]) > {since}]:
        print(options["--delimiter"].join(row[name] for name in options["--format"].split(",")))
"""
HOURS = (4, 3, 2, 1)
"""Of four attempts, one after the other; the first two ended before the window."""


@pytest.fixture(autouse=True)
def cluster(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    begin = int(time.time()) - 12 * 3600
    rows = []
    for number, hours in enumerate(HOURS):
        last = number == len(HOURS) - 1
        times = {"Submit": begin, "Eligible": begin, "Start": begin, "End": begin + hours * 3600}
        attempt = row(
            JobID=7, State="COMPLETED" if last else "PREEMPTED", NCPUS=8, AllocTRES="cpu=8,gres/gpu=4,mem=8G,node=1",
            ElapsedRaw=hours * 3600, **times,
        )  # fmt: skip
        rows += [attempt, step(attempt)]
        begin += hours * 3600
    script = SACCT.format(
        python=sys.executable, rows=json.dumps(rows), columns=" ".join(FakeSacct().columns),
        since=int(time.time()) - 5 * 3600,
    )  # fmt: skip
    sacct = tmp_path / "slurm" / "sacct"
    sacct.parent.mkdir()
    sacct.write_text(script)
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sacct.parent}:{os.environ['PATH']}")


def test_attempts_that_ended_before_the_window_belong_to_the_job() -> None:
    (job,) = ok("report", "jobs", "-a", "--since", "5h", "--json").json
    assert (job["attempts"], job["elapsed_all_s"]) == (4, sum(HOURS) * 3600)
    assert job["cost"] == pytest.approx(sum(HOURS) * 4 * 2.0)
    assert job["goodput"] == pytest.approx(HOURS[-1] / sum(HOURS))


def test_the_sums_of_all_jobs_cover_every_attempt_in_each_column() -> None:
    out = ok("report", "jobs", "-a", "--since", "5h").out
    header, sums = (line.split() for line in out.splitlines()[-2:])
    assert sums[0] == "all"
    hours = sum(HOURS)
    text = out.splitlines()[-1]
    for expected in (f"{hours * 8:.2f}", f"{hours * 4:.2f}", f"{sum(HOURS[:-1]):.2f}", f"{hours * 4 * 2:.2f}"):
        assert expected in text.split(), (header, text)


def test_energy_is_marked_as_modelled_where_that_of_one_attempt_is() -> None:
    (job,) = ok("report", "jobs", "-a", "--since", "5h", "--json").json
    assert (job["energy_source"], job["energy_j"]) == ("modelled", pytest.approx(sum(HOURS) * 3600 * 4 * 300))
