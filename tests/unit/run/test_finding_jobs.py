"""The index of jobs, and how a user names them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from commandline import within
from msgspec.structs import replace

import hpcjobs
from hpcjobs.errors import ConfigError, RequestError, UnknownJobError
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.listing import select_unfinished
from hpcjobs.run.select import newest, select

WRITER = """
import sys
from hpcjobs.run import index
for n in range(20):
    where = {"site": "s", "scheduler": "slurm", "run_dir": "/r"}
    index.add(index.Entry(job_id=f"{sys.argv[1]}{n:02}", name="x", submitted=1.0, **where))
"""


def entry(job_id: str, **more: object) -> Entry:
    base = Entry(
        job_id=job_id,
        name="train",
        site="tu-hpc",
        scheduler="slurm",
        run_dir=f"/runs/{job_id}",
        submitted=float(job_id.strip("L")),
    )
    return replace(base, **more)


@pytest.fixture
def jobs() -> None:
    for job_id in ("101", "102", "104"):
        index.add(entry(job_id))
    index.add(entry("200", name="sweep", array="0-3,7%2"))
    index.add(entry("L1", site="local", scheduler="local", submitted=50.0))


def ids(*arguments: str, site: str | None = None) -> list[str]:
    return [e.job_id if e.task is None else f"{e.job_id}_{e.task}" for e in select(arguments, site=site)]


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize(
    "line", ["show NAME", "why NAME", "logs NAME", "diff NAME 104", "diff 104 NAME", "jupyter open NAME"]
)
def test_a_verb_for_one_job_refuses_a_name_of_several(line: str) -> None:
    """It would answer for the first of them."""
    for name, count, first in (("101-104", 3, "101"), ("200_[1-2]", 2, "200_1")):
        answer = within(*line.replace("NAME", name).split())
        assert answer.code == RequestError.exit_code
        assert f"{name} names {count} jobs, and this is for one\nhint: such as {first}\n" in answer.err
        with pytest.raises(RequestError, match="this is for one"):
            hpcjobs.find(name)


def test_writers_at_once_lose_no_record() -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(n)], env=os.environ.copy()) for n in range(10, 18)]
    assert [writer.wait(60) for writer in writers] == [0] * 8
    assert {e.job_id for e in index.entries()} == {f"{n}{k:02}" for n in range(10, 18) for k in range(20)}
    assert [path.name for path in index.index_dir().iterdir() if path.name.startswith(".")] == []


def test_the_index_is_the_users_alone() -> None:
    index.add(entry("1"))
    assert index.index_dir().stat().st_mode & 0o077 == 0
    assert next(index.index_dir().iterdir()).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["101"], ["101"]),
        (["101-104"], ["101", "102", "104"]),
        (["200_7"], ["200_7"]),
        (["200"], ["200"]),
        (["L1"], ["L1"]),
        (["L1-L9"], ["L1"]),
        (["train"], ["104"]),
        (["sweep", "101", "101-102"], ["200", "101", "102"]),
    ],
)
def test_jobs_are_named_by_id_range_task_and_name(jobs: None, arguments: list[str], expected: list[str]) -> None:
    assert ids(*arguments) == expected


def test_a_job_is_named_by_its_run_folder_from_anywhere(jobs: None, tmp_path: Path) -> None:
    folder = tmp_path / "some run"
    folder.mkdir()
    (folder / "submitted.json").write_bytes(msgspec.json.encode(entry("999")))
    assert ids(str(folder)) == ["999"]
    with pytest.raises(UnknownJobError, match="is no run folder of a submitted job"):
        select([str(tmp_path)])


@pytest.mark.parametrize("reason", ["Too many levels of symbolic links", "JSON is malformed"])
def test_a_run_folder_that_cannot_be_read_is_not_said_to_be_none(jobs: None, tmp_path: Path, reason: str) -> None:
    written = tmp_path / "submitted.json"
    written.write_text("{x")
    if "links" in reason:
        written.unlink()
        written.symlink_to(written)
    with pytest.raises(UnknownJobError, match=f"submitted.json cannot be used: {reason}") as caught:
        select([str(tmp_path)])
    assert "is no run folder" not in str(caught.value)


@pytest.mark.parametrize("name", ["103", "103_2", "L3"])
def test_a_job_that_no_scheduler_knows_is_none_of_mine_where_no_run_folder_is_needed(jobs: None, name: str) -> None:
    with pytest.raises(UnknownJobError) as caught:
        select([name], foreign=True)
    job_id = name.partition("_")[0]
    assert str(caught.value).startswith(f"no job {job_id} of yours: neither submitted with hpcjobs, nor known to the")
    assert caught.value.hint == "`hpcjobs ps -a` lists your jobs"


def test_a_folder_without_a_job_is_told_from_a_name_that_no_job_has(jobs: None, here: Path) -> None:
    (here / "x1").mkdir()
    with pytest.raises(UnknownJobError, match="no job named 'x1', and folder x1 is no run folder of a submitted job"):
        select(["x1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("103", "no job 103 was submitted with hpcjobs"),
        ("300-400", "no job in the range 300-400"),
        ("trian", "did you mean 'train'?"),
        ("101_0", "job 101 is no array"),
        ("200_5", "job 200 is an array of 0-3,7%2"),
        ("1-99999999999", "no job in the range"),
    ],
)
def test_a_word_that_names_no_job_is_answered_with_help(jobs: None, text: str, message: str) -> None:
    with pytest.raises(UnknownJobError) as caught:
        select([text])
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["101", "101-101"])
def test_an_id_that_two_sites_gave_out_needs_the_site(jobs: None, text: str) -> None:
    index.add(entry("101", site="gcp-t4", run_dir="/runs/another"))
    with pytest.raises(RequestError, match="exists on several sites: tu-hpc, gcp-t4"):
        select([text])
    assert [e.site for e in select([text], site="gcp-t4")] == ["gcp-t4"]


def test_the_newest_job_is_the_last_one_submitted(jobs: None) -> None:
    assert newest().job_id == "200"
    assert newest(site="local").job_id == "L1"
    with pytest.raises(UnknownJobError, match="no job of site gcp-t4 recorded"):
        newest(site="gcp-t4")


def test_a_site_restricts_the_search_by_its_name_or_its_file_and_an_unknown_one_is_named(
    jobs: None, here: Path
) -> None:
    (here / "mine.yaml").write_text("description: mine\nscheduler: local\npartitions: {}\n")
    index.add(entry("L2", site="mine", scheduler="local"))
    assert ids("L2", site="mine") == ids("L2", site="./mine.yaml") == ["L2"]
    assert newest(site="./mine.yaml").job_id == "L2"
    with pytest.raises(UnknownJobError, match=r"no job L1 of site \./mine\.yaml was submitted"):
        ids("L1", site="./mine.yaml")
    with pytest.raises(ConfigError, match="no site 'tu-hcp'"):
        select_unfinished(site="tu-hcp")


def test_a_run_folder_here_does_not_take_the_name_of_a_recorded_job(
    jobs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sweep", "other"):
        (tmp_path / name).mkdir()
        record = msgspec.json.encode(entry("9", name=name, run_dir=str(tmp_path / name)))
        (tmp_path / name / "submitted.json").write_bytes(record)
    assert ids("sweep") == ["200"]
    assert ids("./sweep") == ids("other") == ["9"]
