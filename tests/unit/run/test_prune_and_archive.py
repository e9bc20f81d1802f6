"""Old run folders are removed only when asked, and never of what runs; a job is one tar file with checksums."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from commandline import ok, within
from scripted_slurm import answer

from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord, State

DAY = 86_400


def job(here: Path, job_id: str, *, days: float, state: str | None = "COMPLETED", size: int = 10) -> Path:
    """A recorded job that ended so many days ago; without ``state`` it is not accounted for."""
    folder = here / "runs" / f"job{job_id}"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "out").write_bytes(b"x" * size)
    ended = time.time() - days * DAY
    entry = Entry(job_id, f"job{job_id}", "mine", "slurm", str(folder), ended - 60)
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    if state is not None:
        record = JobRecord(job_id=job_id, state=State[state], source="sacct", ended=ended, exit_code=0)
        (folder / "accounting.json").write_bytes(msgspec.json.encode([record]))
    index.add(entry)
    return folder


@pytest.fixture
def here_with_slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("squeue", "sacct", "scontrol"):
        answer(answers, command, ":")
    monkeypatch.setenv("PATH", f"{answers}:{os.environ['PATH']}")
    return here


def pruned(*arguments: str) -> list[str]:
    return [row["job_id"] for row in ok("prune", "--json", *arguments).json["jobs"]]


def test_old_jobs_are_listed_and_removed_only_when_asked(here_with_slurm: Path) -> None:
    old, recent = job(here_with_slurm, "1", days=40), job(here_with_slurm, "2", days=3)
    unaccounted = job(here_with_slurm, "3", days=50, state=None)
    assert "1 job, " in ok("prune").out
    assert old.exists()
    answered = ok("prune", "--remove")
    assert "not listed: 1 job of that age, still waiting, running, or not accounted for" in answered.err
    assert (old.exists(), recent.exists(), unaccounted.exists()) == (False, True, True)
    assert [entry.job_id for entry in index.entries()] == ["3", "2"]


def test_age_state_and_size_select(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=40, state="FAILED", size=5000)
    job(here_with_slurm, "2", days=10, size=9000)
    assert pruned() == ["1"]
    assert pruned("--older-than", "5d") == ["1", "2"]
    assert pruned("--older-than", "5d", "--state", "FAILED") == ["1"]
    assert pruned("--older-than", "5d", "--larger-than", "7K") == ["2"]


def test_an_age_of_zero_is_every_job_that_has_ended(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=40)
    job(here_with_slurm, "2", days=0.001)
    job(here_with_slurm, "3", days=0.001, state=None)
    for zero in ("0s", "0", "0d"):
        assert pruned("--older-than", zero) == ["1", "2"]


@pytest.mark.parametrize("age", ["soon", "30", "-1d", "1y", ""])
def test_an_age_that_cannot_be_read_is_named_with_what_is_allowed(here_with_slurm: Path, age: str) -> None:
    refused = within("prune", f"--older-than={age}")
    assert refused.code == 5
    assert f"--older-than {age}: not a time\nhint: write 30d, 12h or 2w; 0s means every job" in refused.err
    assert "--larger-than big: not a size" in within("prune", "--larger-than", "big").err


def test_what_is_no_run_folder_of_the_job_is_left_alone(here_with_slurm: Path) -> None:
    """A folder that was replaced, a link, a chunk of a sweep, and an entry without a folder."""
    other = job(here_with_slurm, "1", days=40)
    (other / "submitted.json").write_bytes(msgspec.json.encode(Entry("9", "x", "mine", "slurm", str(other), 1.0)))
    linked = job(here_with_slurm, "2", days=40)
    linked.rename(here_with_slurm / "elsewhere")
    linked.symlink_to(here_with_slurm / "elsewhere")
    removed = job(here_with_slurm, "3", days=40)
    subprocess.run(["rm", "-r", removed], check=True)
    assert pruned("--remove") == ["3"]
    assert (other.exists(), (here_with_slurm / "elsewhere").exists()) == (True, True)
    assert [entry.job_id for entry in index.entries()] == ["1", "2"]


def test_a_job_that_was_requeued_since_is_no_old_job(here_with_slurm: Path, tmp_path: Path) -> None:
    folder = job(here_with_slurm, "1", days=0.5)
    row = ["1", "job1", "RUNNING", "None", "main", "n1", "1", "%s", "%s", "1:00", "1:00:00", str(folder / "job.sh")]
    answer(tmp_path / "slurm", "squeue", "printf '" + "\\037".join(row) + "\\n' $(date +%s) $(date +%s)")
    assert pruned("--older-than", "1h", "--remove") == []
    assert folder.exists()


def test_a_file_system_that_is_away_loses_no_record(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=40)
    (here_with_slurm / "runs").rename(here_with_slurm / "away")
    assert pruned("--remove") == []
    assert [entry.job_id for entry in index.entries()] == ["1"]


def test_an_archive_has_every_file_its_checksum_and_the_records(here_with_slurm: Path, tmp_path: Path) -> None:
    folder = job(here_with_slurm, "1", days=2)
    (folder / "latest").symlink_to("logs")
    os.link(folder / "logs" / "out", folder / "again")
    (folder / "näme \udcff").write_text("odd")
    os.mkfifo(folder / "pipe")
    assert "job1_1.tar  " in ok("archive", "1").out
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-x", "-f", "job1_1.tar", "-C", unpacked], check=True)
    check = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=unpacked, capture_output=True, text=True)
    assert check.returncode == 0, check
    files = {path.name for path in unpacked.rglob("*")}
    assert {"out", "again", "latest", "näme \udcff", "accounting.json", "ARCHIVE.json"} <= files
    assert "pipe" not in files
    about = json.loads((unpacked / "ARCHIVE.json").read_text())
    assert (about["entry"]["job_id"], about["records"][0]["state"]) == ("1", "COMPLETED")


def test_an_archive_is_whole_or_not_there(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=2)
    running = job(here_with_slurm, "2", days=0, state="RUNNING")
    assert within("archive", "1", "--output", "gone/x.tar").code == 5
    assert within("archive", "1", "--output", str(here_with_slurm / "runs/job1/x.tar")).code == 5
    assert "its files still change" in within("archive", "2").err
    ok("archive", "1", "--output", "x.tar.gz")
    assert "exists already" in within("archive", "1", "--output", "x.tar.gz").err
    assert sorted(path.name for path in here_with_slurm.iterdir()) == ["runs", "x.tar.gz"]
    assert running.exists()
