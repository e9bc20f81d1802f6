"""``hpcjobs report jobs ID``: whoever's the job is, and however its id is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from commandline import ok, within
from msgspec.structs import replace
from sacct_versions import BEGUN, FakeSacct, row

from hpcjobs.run import index
from hpcjobs.run.index import Entry

SITE = "{description: two nodes, partitions: {compute: {nodes: 2, node: {cpus: 8, mem: 8G}}}}\n"
ROWS = [
    row(JobID="102+0", JobIDRaw="102"), row(JobID="102+1", JobIDRaw="103"),
    row(JobID="9_0", JobIDRaw="9"), row(JobID="9_1", JobIDRaw="10"), row(JobID="9", Submit=BEGUN + 60),
    row(JobID="7_3", JobIDRaw="8"), row(JobID="7_4", JobIDRaw="9"), row(JobID="7_[5-9]", JobIDRaw="7", State="PENDING"),
]  # fmt: skip
SACCT = """#!{python}
import json, sys
said = {{word.partition("=")[0]: word.partition("=")[2] for word in sys.argv[1:]}}
print("asked", *sys.argv[1:], file=open({log!r}, "a"))
if "--helpformat" in said:
    print({columns!r})
else:
    for row in json.loads({rows!r}):
        print(said["--delimiter"].join(row[name] for name in said["--format"].split(",")))
"""


@pytest.fixture(autouse=True)
def sacct_log(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster whose sacct shows jobs of ``ana``, who is somebody else; gives the record of what it was asked."""
    (here / "site_configs").mkdir()
    (here / "site_configs" / "mine.yaml").write_text(SITE)
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    commands, log = tmp_path / "slurm", tmp_path / "asked"
    commands.mkdir()
    script = SACCT.format(
        python=sys.executable, log=str(log), columns=" ".join(FakeSacct().columns), rows=json.dumps(ROWS)
    )
    (commands / "sacct").write_text(script)
    (commands / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["102"], {"102+0", "102+1"}),
        (["102+1"], {"102+1"}),
        (["7"], {"7_3", "7_4", "7_[5-9]"}),
        (["7_3"], {"7_3"}),
        (["7_6"], {"7_[5-9]"}),
        (["7_3", "102+0"], {"7_3", "102+0"}),
    ],
)
def test_a_job_of_anybody_is_found_by_its_id(ids: list[str], expected: set[str]) -> None:
    assert {job["job_id"] for job in ok("report", "jobs", *ids, "--json").json} == expected


def test_of_a_plain_job_and_an_array_that_had_its_id_each_has_rows_of_its_own(here: Path) -> None:
    (here / "run").mkdir()
    index.add(Entry("9", "train", "mine", "slurm", str(here / "run"), BEGUN + 60.0))
    folders = {job["job_id"]: job["run_dir"] for job in ok("report", "jobs", "9", "--json").json}
    assert folders == {"9": str(here / "run"), "9_0": None, "9_1": None}


def test_nothing_is_advised_from_an_earlier_job_that_had_the_id(here: Path) -> None:
    """The accounting does not have the user's own job yet. A requeued one, of another's folder, has a later row."""
    (here / "run").mkdir()
    before = Entry("9", "later", "mine", "slurm", str(here / "run"), BEGUN - 90_000.0)
    (here / "run" / "submitted.json").write_bytes(msgspec.json.encode(before))
    advised = ok("report", "advise", str(here / "run")).out
    assert {line.partition(":")[0] for line in advised.splitlines()} == {"9", "9_0", "9_1"}
    own = replace(before, submitted=BEGUN + 90_000.0)
    (here / "run" / "submitted.json").write_bytes(msgspec.json.encode(own))
    index.add(own)
    for name in ("9", str(here / "run")):
        answered = ok("report", "advise", name)
        assert answered.out == ""
        assert "job 9: no record of it to advise from" in answered.err


def test_a_user_that_is_named_still_restricts_the_ids() -> None:
    assert "no jobs" in ok("report", "jobs", "102", "--user", "bo").out


def test_sacct_is_asked_about_the_cluster_that_the_environment_names(
    sacct_log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """squeue and sbatch heed SLURM_CLUSTERS; sacct does not."""
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    ok("report", "jobs", "102", "--json")
    assert "--clusters=other" in sacct_log.read_text()


def test_sums_and_jobs_that_nobody_measured_are_printed_as_unknown() -> None:
    """A site without prices and watts: no ``0.00 None``, no ``0 Wh``, no ``0 kWh``."""
    for arguments in (["7"], ["7", "--by", "user"]):
        answer = within("report", "jobs", "--all-users", *arguments)
        assert answer.code == 0, answer
        assert "None" not in answer.out
        assert "Wh" not in answer.out


@pytest.mark.parametrize("form", ["['--json']", "[]"], ids=["JSON", "table"])
def test_accounting_needs_neither_scipy_nor_matplotlib(form: str) -> None:
    """They may be missing, or be broken, where only jobs are looked at."""
    program = (
        "import sys; sys.modules.update(scipy=None, matplotlib=None)\n"
        "import hpcjobs\n"
        "from hpcjobs.cli import main\n"
        "assert len(hpcjobs.accounting(jobs=['102'])) == 2\n"
        f"sys.argv[1:] = ['report', 'jobs', '102'] + {form}\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "102+1" in done.stdout
