"""Run folders and records that are damaged: each verb goes on, and says once what it cannot read."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import ok, within

FILES = ("state.json", "accounting.json", "summary.json", "manifest.json", "submitted.json", "attempts.jsonl")
CONTENTS = ("", "[]", '{"job_id": "L1", "sta', "7", "null", '{"state": 3}', "\x00" * 40, "[" * 5000)


def garbled(content: str) -> Callable[[Path], None]:
    def damage(run_dir: Path) -> None:
        for name in FILES:
            (run_dir / name).write_text(content, encoding="utf-8")

    return damage


def folders_in_their_place(run_dir: Path) -> None:
    for name in FILES:
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).mkdir()


def a_file_in_its_place(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    run_dir.write_text("a file\n", encoding="utf-8")


def removed(run_dir: Path) -> None:
    run_dir.unlink()


@pytest.fixture
def jobs(here: Path) -> Path:
    """Two local jobs that have ended; the run folder of the first."""
    ok("submit", "--site", "local", "--launcher", "spawn", "--name", "first", "--wait", "true")
    ok("submit", "--site", "local", "--launcher", "spawn", "--name", "second", "--wait", "true")
    (run_dir,) = (here / "runs").glob("first-*")
    return run_dir


def each_verb(run_dir: Path) -> None:
    listed = within("ps", "-a")
    assert "second" in listed.out, listed
    asking = (["ps"], ["show", "L1"], ["show", "--json", "L1"], ["logs", "L1"], ["wait", "L1"], ["cancel", "L1"])
    for arguments in (*asking, ["prune", "--older-than", "1m"]):
        answer = within(*arguments)  # an exception that nobody foresaw would come through
        assert answer.code in (0, 1, 3, 6), (arguments, answer)
    within("show", str(run_dir))
    for arguments in (["archive", "L1"], ["exec", "L1", "true"], ["hold", "L1"]):
        assert within(*arguments).code in (0, 5, 6), arguments
    Path("first_L1.tar").unlink(missing_ok=True)


@pytest.mark.filterwarnings("default::hpcjobs.errors.HpcJobsWarning")
def test_one_bad_run_folder_ends_no_verb(jobs: Path) -> None:
    for damage in [*map(garbled, CONTENTS), folders_in_their_place, a_file_in_its_place, removed]:
        damage(jobs)
        each_verb(jobs)
        if jobs.is_dir():
            for name in FILES:
                path = jobs / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.filterwarnings("default::hpcjobs.errors.HpcJobsWarning")
@pytest.mark.parametrize(("option", "value"), [("mem", "8x"), ("time", "soon")])
def test_a_request_that_nobody_can_read_is_named_and_ends_no_report(here: Path, option: str, value: str) -> None:
    answer = ok("submit", "--site", "local", "--mem", "1G", "--time", "5m", "--json", "--wait", "true")
    manifest = Path(answer.json["run_dir"]) / "manifest.json"
    content, count = re.subn(rf'"{option}": *"[^"]*"', f'"{option}": "{value}"', manifest.read_text())
    assert count
    manifest.write_text(content)
    report = within("report", "jobs", "--site", "local")
    assert (report.code, "COMPLETED" in report.out, value in report.err) == (0, True, True), report


@pytest.mark.filterwarnings("default::hpcjobs.errors.HpcJobsWarning")
@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_a_run_folder_that_cannot_be_read_is_named_and_ends_no_verb(
    jobs: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    open_descriptor, stat = os.open, os.stat

    def refused(path: object) -> None:
        if str(path).startswith(str(jobs)):
            raise OSError(number, os.strerror(number), str(path))

    def open_refused(path: str | Path, *arguments: int, **more: int) -> int:
        refused(path)
        return open_descriptor(path, *arguments, **more)

    def stat_of(path: int | str | Path, *arguments: object, **more: object) -> os.stat_result:
        refused(path)
        return stat(path, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_refused)
    monkeypatch.setattr(os, "stat", stat_of)
    each_verb(jobs)
    assert f"{jobs}/accounting.json cannot be used: {os.strerror(number)}" in within("ps").err


def test_a_job_that_cannot_be_recorded_runs_and_its_id_and_folder_are_there(here: Path) -> None:
    state = Path.home() / ".local" / "state" / "hpcjobs"
    state.mkdir(parents=True)
    (state / "jobs").write_text("a file where the list of jobs should be\n", encoding="utf-8")
    answer = within("submit", "--site", "local", "--launcher", "spawn", "--wait", "true")
    (run_dir,) = (here / "runs").glob("true-*")
    assert (answer.code, answer.out.splitlines()[0]) == (0, "job L1  true on site local")
    assert "job L1 was accepted, but could not be recorded in the list of jobs" in answer.err
    assert (run_dir / "submitted.json").exists()
    assert within("show", str(run_dir)).out.startswith("job L1  true")


@pytest.mark.filterwarnings("default::hpcjobs.errors.HpcJobsWarning")
def test_a_record_of_a_sweep_that_is_cut_or_no_text_is_named(here: Path) -> None:
    ok("sweep", "--site", "local", "--launcher", "spawn", "--name", "s", "--set", "i=1", "--wait", "true")
    sweeps = Path.home() / ".local/state/hpcjobs/sweeps"
    (sweeps / "other.jsonl").write_text('{"na', encoding="utf-8")
    answer = within("sweep", "status", "s")
    assert (answer.code, "other.jsonl, line 1 cannot be used" in answer.err) == (0, True), answer
    (chunk,) = (here / "runs/sweep-s/chunks").iterdir()
    (chunk / "chunk.json").write_bytes(b'{"number": 1, "cells": ["\xff"], "pack": 1}')
    answer = within("sweep", "status", "s")
    assert (answer.code, "chunk.json cannot be used" in answer.err) == (4, True), answer


@pytest.mark.parametrize("site", ["local", "./mine.yaml"])
def test_a_list_of_hosts_beyond_slurms_limit_is_refused(here: Path, site: str) -> None:
    (here / "mine.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 4}}}\n", encoding="utf-8")
    answer = within("submit", "--site", site, "-w", "n[1-999999999]", "true")
    assert (answer.code, "a range of more than 65536 hosts" in answer.err) == (5, True), answer


def test_a_snapshot_keeps_its_links_and_where_they_lead(here: Path) -> None:
    (here / "data").mkdir()
    (here / "data/d").write_text("d", encoding="utf-8")
    (here / "project/sub").mkdir(parents=True)
    (here / "project/sub/f").write_text("f", encoding="utf-8")
    for name, target in {"inner": "sub", "outer": "../data", "file": "../data/d"}.items():
        (here / "project" / name).symlink_to(target)
    ok("submit", "--site", "local", "--launcher", "spawn", "--chdir", "project", "--snapshot", "--wait",
       "cat", "inner/f", "outer/d", "file")  # fmt: skip
    (copy,) = here.rglob("runs/cat-*/code")
    assert os.readlink(copy / "inner") == "sub"
    assert [(copy / name).read_text(encoding="utf-8") for name in ("inner/f", "outer/d", "file")] == ["f", "d", "d"]
