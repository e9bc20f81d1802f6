"""Old run folders are removed only when asked, and never of what runs; a job is one tar file with checksums."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from commandline import ok, start, within
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows, queued_row
from waiting import eventually

from hpcjobs.run import archive, index
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


def write_state(folder: Path, state: str, **more: object) -> None:
    """What the job itself wrote."""
    content = {"job_id": folder.name.removeprefix("job"), "state": state, "exit_code": None, "started": 1, "nodes": "n"}
    (folder / "state.json").write_text(json.dumps({**content, "ended": None, **more}))


def queued(folder: Path, *, task: str = "") -> str:
    """squeue's answer: the job of the run folder runs."""
    job_id = folder.name.removeprefix("job") + task
    return print_rows(queued_row(JobID=job_id, JobName=folder.name, Submit="$(date +%s)", Command=f"{folder}/job.sh"))


def test_old_jobs_are_listed_and_removed_only_when_asked(here_with_slurm: Path, tmp_path: Path) -> None:
    old, recent = job(here_with_slurm, "1", days=40), job(here_with_slurm, "2", days=3)
    unaccounted = job(here_with_slurm, "3", days=35, state=None)
    write_state(unaccounted, "RUNNING")
    answer(tmp_path / "slurm", "squeue", queued(unaccounted))
    assert "1 job, " in ok("prune").out
    assert old.exists()
    answered = ok("prune", "--remove")
    assert (
        "not listed: 1 job of that age, still waiting, running or ending, in use, or without a known end"
        in answered.err
    )
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
    job(here_with_slurm, "2", days=0.004)
    job(here_with_slurm, "3", days=0.004, state=None)
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
    answer(tmp_path / "slurm", "squeue", queued(folder))
    assert pruned("--older-than", "1h", "--remove") == []
    assert folder.exists()


def test_a_job_that_runs_without_its_folder_stays_listed(here_with_slurm: Path, tmp_path: Path) -> None:
    folder = job(here_with_slurm, "1", days=40, state=None)
    answer(tmp_path / "slurm", "squeue", queued(folder))
    subprocess.run(["rm", "-r", folder], check=True)
    assert pruned("--remove") == []
    assert [entry.job_id for entry in index.entries()] == ["1"]


def test_without_accounting_a_job_that_wrote_its_end_or_that_nobody_knows_is_old(
    here_with_slurm: Path, tmp_path: Path
) -> None:
    answer(tmp_path / "slurm", "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    job(here_with_slurm, "1", days=40, state=None)
    ended = job(here_with_slurm, "2", days=20, state=None)
    write_state(ended, "COMPLETED", exit_code=0, ended=time.time() - 20 * DAY)
    job(here_with_slurm, "3", days=20, state=None)
    assert pruned("--older-than", "10d", "--remove") == ["1", "2"]


@pytest.mark.parametrize(("days", "is_old"), [(40, True), (20, False)])
def test_a_task_that_nobody_knows_has_ended_once_its_array_is_old(
    here_with_slurm: Path, days: float, is_old: bool
) -> None:
    folder = here_with_slurm / "runs" / "job1"
    (folder / "0").mkdir(parents=True)
    write_state(folder / "0", "COMPLETED", exit_code=0, ended=time.time() - days * DAY)
    entry = Entry("1", "job1", "mine", "slurm", str(folder), time.time() - days * DAY - 60, array="0-1")
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    assert pruned("--older-than", "10d") == ["1"] * is_old


def test_the_folder_that_a_waiting_rerun_begins_in_is_kept(here_with_slurm: Path, tmp_path: Path) -> None:
    first = job(here_with_slurm, "1", days=40)
    (first / "code").mkdir()
    again = job(here_with_slurm, "2", days=1, state=None)
    (again / "manifest.json").write_text(json.dumps({"job": {"chdir": str(first / "code")}}))
    answer(tmp_path / "slurm", "squeue", queued(again))
    assert pruned("--remove") == []
    answer(tmp_path / "slurm", "squeue", ":")
    write_state(again, "COMPLETED", exit_code=0, ended=time.time() - 600)
    assert pruned("--remove") == ["1"]
    assert not first.exists()


@pytest.mark.parametrize("age_s", [60, 400])
def test_a_job_that_wrote_its_end_a_moment_ago_may_still_be_ending_and_is_not_pruned(
    here_with_slurm: Path, age_s: int
) -> None:
    """At its time limit it writes its end, and its processes end half a minute later."""
    folder = job(here_with_slurm, "1", days=1, state=None)
    now = time.time()
    write_state(folder, "CANCELLED", started=now - 2000, ended=now - age_s)
    assert pruned("--older-than", "0s", "--remove") == ([] if age_s == 60 else ["1"])
    assert folder.exists() == (age_s == 60)


def test_a_job_that_the_accounting_has_seen_end_a_moment_ago_may_still_be_ending_and_is_not_pruned(
    here_with_slurm: Path,
) -> None:
    """Its nodes are cleaned up for minutes where an epilog takes long (COMPLETING)."""
    ended = job(here_with_slurm, "1", days=60 / 86400)
    over = job(here_with_slurm, "2", days=600 / 86400)
    assert pruned("--older-than", "0s", "--remove") == ["2"]
    assert ended.exists()
    assert not over.exists()


def test_a_folder_that_cannot_be_removed_stays_complete(here_with_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = job(here_with_slurm, "1", days=40)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "rename", refuse)
    answered = within("prune", "--remove")
    assert answered.code == 1
    assert f"run folder {folder} cannot be removed: Permission denied" in answered.err
    assert (folder / "logs" / "out").exists()
    assert [entry.job_id for entry in index.entries()] == ["1"]


@pytest.mark.parametrize("call", ["os.rename", "os.rmdir"])
def test_a_folder_that_another_prune_removes_at_the_same_time_is_no_failure(
    here_with_slurm: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = job(here_with_slurm, "1", days=40)
    real, others = getattr(os, call.removeprefix("os.")), []

    def lose_the_race(path: Path, *arguments: object, **more: object) -> None:
        real(path, *arguments, **more)
        if not others:
            others.append(path)
            raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr(call, lose_the_race)
    answered = ok("prune", "--remove")
    assert "cannot be removed" not in answered.err
    assert others
    assert list(folder.parent.iterdir()) == []


def test_pruned_local_jobs_leave_nothing_in_the_queue_of_the_machine_and_no_id_returns() -> None:
    for _ in range(3):
        ok("submit", "--site", "local", "--launcher", "spawn", "--wait", "true")
    assert pruned("--older-than", "0s", "--remove") == ["L1", "L2", "L3"]
    (jobs,) = Path.home().glob(".local/state/hpcjobs/local/*/jobs")
    assert [path.name for path in jobs.iterdir()] == ["L3"]
    ok("submit", "--site", "local", "--launcher", "spawn", "--wait", "true")
    assert [entry.job_id for entry in index.entries()] == ["L4"]


def test_a_file_system_that_is_away_loses_no_record(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=40)
    (here_with_slurm / "runs").rename(here_with_slurm / "away")
    assert pruned("--remove") == []
    assert [entry.job_id for entry in index.entries()] == ["1"]


ODDER = ("two\nlines\\n", "end of a line\r", "a \\r in it")


def test_an_archive_has_every_file_its_checksum_and_the_records(here_with_slurm: Path, tmp_path: Path) -> None:
    folder = job(here_with_slurm, "1", days=2)
    (folder / "latest").symlink_to("logs")
    os.link(folder / "logs" / "out", folder / "again")
    (folder / "näme \udcff").write_text("odd")
    for odder in ODDER:
        (folder / odder).write_text("odder")
    os.mkfifo(folder / "pipe")
    assert "job1_1.tar  " in ok("archive", "1").out
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-x", "-f", "job1_1.tar", "-C", unpacked], check=True)
    check = subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=unpacked, capture_output=True, text=True)
    assert check.returncode == 0, check
    files = {path.name for path in unpacked.rglob("*")}
    assert {"out", "again", "latest", "näme \udcff", *ODDER, "accounting.json", "ARCHIVE.json"} <= files
    assert "pipe" not in files
    about = json.loads((unpacked / "ARCHIVE.json").read_text())
    assert (about["entry"]["job_id"], about["records"][0]["state"]) == ("1", "COMPLETED")


def test_an_archive_is_whole_or_not_there(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=2)
    running = job(here_with_slurm, "2", days=0, state="RUNNING")
    assert within("archive", "1", "--output", "gone/x.tar").code == 5
    assert within("archive", "1", "--output", str(here_with_slurm / "runs/job1/x.tar")).code == 5
    assert "its files still change" in within("archive", "2").err
    assert "an archive is a tar file" in within("archive", "1", "--output", "x.zip").err
    ok("archive", "1", "--output", "x.tar.gz")
    assert "exists already" in within("archive", "1", "--output", "x.tar.gz").err
    assert sorted(path.name for path in here_with_slurm.iterdir()) == ["runs", "x.tar.gz"]
    assert running.exists()


def test_an_archive_of_another_command_that_has_come_meanwhile_stays(
    here_with_slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(here_with_slurm, "1", days=2)
    write = archive._write

    def write_beside_another(*arguments: Any) -> int:
        Path("x.tar").write_text("of another job")
        return write(*arguments)

    monkeypatch.setattr(archive, "_write", write_beside_another)
    assert "exists already" in within("archive", "1", "--output", "x.tar").err
    assert Path("x.tar").read_text() == "of another job"
    assert sorted(path.name for path in here_with_slurm.iterdir()) == ["runs", "x.tar"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_archive_that_a_signal_ends_leaves_no_file(here_with_slurm: Path, number: signal.Signals) -> None:
    folder = job(here_with_slurm, "1", days=2)
    os.truncate(folder / "logs" / "out", 8 << 30)  # without blocks on the disk, and long to compress
    archiving = start("archive", "1", "--output", "x.tar.xz")
    eventually(lambda: list(here_with_slurm.glob(".x.tar.xz*")), what="the begin of the archive")
    archiving.send_signal(number)
    archiving.communicate(timeout=60)
    assert archiving.returncode == 128 + number
    assert [path.name for path in here_with_slurm.iterdir()] == ["runs"]


@pytest.mark.parametrize("swapped", ["logs/out", "logs"])
def test_what_takes_the_name_of_a_file_meanwhile_is_not_archived(
    here_with_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swapped: str
) -> None:
    """Who may write to the folder puts a link to a private file in the place of a file that was looked at."""
    folder, private = job(here_with_slurm, "1", days=2), tmp_path / "private"
    private.mkdir()
    (private / "out").write_text("secret key")
    look_at = tarfile.TarFile.gettarinfo

    def look_then_swap(tar: tarfile.TarFile, name: Path, arcname: str) -> tarfile.TarInfo:
        member = look_at(tar, name, arcname)
        if arcname.endswith("logs/out"):
            (folder / swapped).rename(folder / "away")
            (folder / swapped).symlink_to(private / swapped.removeprefix("logs").lstrip("/"))
        return member

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", look_then_swap)
    answer = within("archive", "1", "--output", "x.tar")
    assert answer.code in (0, 5), answer
    assert not Path("x.tar").exists() or b"secret key" not in Path("x.tar").read_bytes()


def test_an_archive_is_as_private_as_the_run_folder(here_with_slurm: Path) -> None:
    job(here_with_slurm, "1", days=2)
    before = os.umask(0o022)
    try:
        ok("archive", "1", "--output", "x.tar")
    finally:
        os.umask(before)
    assert Path("x.tar").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("verb", [("archive",), ("update", "nice=1"), ("rerun",)])
def test_a_verb_for_one_job_refuses_a_range(here_with_slurm: Path, verb: tuple[str, ...]) -> None:
    job(here_with_slurm, "1", days=2)
    job(here_with_slurm, "2", days=2)
    refused = within(verb[0], "1-2", *verb[1:])
    assert refused.code == 5
    assert "1-2 names 2 jobs, and this is for one" in refused.err


def test_a_task_of_an_array_is_archived_once_all_tasks_have_ended(here_with_slurm: Path, tmp_path: Path) -> None:
    folder = job(here_with_slurm, "26", days=2, state=None)
    index.add(Entry("26", "job26", "mine", "slurm", str(folder), time.time() - 2 * DAY, array="0-1"))
    for task, state, ended in ((0, "COMPLETED", time.time() - DAY), (1, "RUNNING", None)):
        (folder / str(task)).mkdir()
        content = {"job_id": f"26_{task}", "state": state, "exit_code": 0, "started": 1, "ended": ended, "nodes": "n"}
        (folder / str(task) / "state.json").write_text(json.dumps(content))
    answer(tmp_path / "slurm", "squeue", queued(folder, task="_1"))
    refused = within("archive", "26_0")
    assert refused.code == 5
    assert "its files still change" in refused.err


def test_a_job_is_not_archived_while_slurm_still_ends_its_programs(here_with_slurm: Path, tmp_path: Path) -> None:
    """The script has written its end when KillWait begins for the ranks."""
    folder = job(here_with_slurm, "7", days=0, state=None)
    write_state(folder, "CANCELLED", ended=time.time(), exit_code=143)
    answer(tmp_path / "slurm", "squeue", queued(folder).replace("RUNNING", "COMPLETING"))
    refused = within("archive", "7")
    assert refused.code == 5
    assert "Slurm still ends job 7: its files still change" in refused.err
    answer(tmp_path / "slurm", "squeue", ":")
    ok("archive", "7")


def test_the_log_of_a_job_whose_run_folder_prune_removed_is_gone(here_with_slurm: Path, tmp_path: Path) -> None:
    """Slurm may give its id to another job, which has a log."""
    job(here_with_slurm, "17", days=40)
    submitted = int(index.entries()[0].submitted)
    ok("prune", "--remove")
    row = accounted_row(JobID=17, JobName="job17", Submit=submitted)
    answer(tmp_path / "slurm", "sacct", f"case $* in *SubmitLine*) {print_rows(row)};; esac")
    for options in ((), ("-f",), ("--json",)):
        answered = within("logs", "17", *options)
        assert answered.code == 6
        assert "job 17: its run folder, with its log, was removed by prune" in answered.out + answered.err
    assert ok("show", "17").out.endswith("run folder removed by prune, with its log\n")
    requeued = accounted_row(JobID=17, JobName="job17", Submit=submitted + 3600)
    answer(tmp_path / "slurm", "sacct", print_rows(requeued))
    assert "removed by prune" in within("logs", "17").err
    later = accounted_row(JobID=17, JobName="later", Submit=submitted + DAY)
    answer(tmp_path / "slurm", "sacct", print_rows(later))
    assert "job 17 printed nothing (" in ok("logs", "17").err
