"""The list of jobs: what damages it, what an older or newer hpcjobs wrote, and what it costs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from commandline import ok
from msgspec.structs import replace

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.run import index
from hpcjobs.run.index import Entry

ENTRY = Entry("7", "train", "mine", "slurm", "/runs/7", submitted=1.0)


def log() -> Path:
    (path,) = index.index_dir().glob("*.jsonl")
    return path


@pytest.mark.parametrize("damage", [b'{"job_id": \n', b"\n", b"\x00\xff\n", b"[]\n", b'{"closed": 3}\n', b"{}\n"])
def test_a_damaged_line_is_skipped_and_named_and_the_others_are_there(damage: bytes) -> None:
    index.add(ENTRY)
    with log().open("ab") as file:
        file.write(damage)
    index.add(replace(ENTRY, job_id="8"))
    if damage.strip():
        with pytest.warns(HpcJobsWarning, match=f"{log()}, line 2: no record of a job, skipped"):
            known = index.entries()
    else:
        known = index.entries()
    assert [entry.job_id for entry in known] == ["7", "8"]


def test_a_line_that_a_full_disk_cut_off_takes_no_other_with_it() -> None:
    index.add(ENTRY)
    with log().open("ab") as file:
        file.write(b'{"job_id":"9","na')
    index.add(replace(ENTRY, job_id="8"))
    with pytest.warns(HpcJobsWarning, match="line 2"):
        assert [entry.job_id for entry in index.entries()] == ["7", "8"]


def test_fields_of_a_newer_hpcjobs_are_left_out() -> None:
    index.add(ENTRY)
    log().write_text(json.dumps({**msgspec.to_builtins(ENTRY), "colour": "red"}) + "\n")
    assert index.entries() == [ENTRY]


def test_a_state_folder_that_is_none_leaves_an_empty_list_and_a_warning() -> None:
    index.index_dir().parent.mkdir(parents=True)
    index.index_dir().write_text("a file\n")
    with pytest.warns(HpcJobsWarning, match="the list of jobs .* cannot be read: Not a directory"):
        assert index.entries() == []


def test_ended_jobs_that_were_marked_are_not_looked_at_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    index.add(replace(ENTRY, run_dir=str(folder), scheduler="local", cluster=os.uname().nodename))
    (folder / "accounting.json").write_text('[{"job_id":"7","state":"COMPLETED","source":"local","ended":5}]')
    assert "no jobs since yesterday" not in ok("ps").out
    (folder / "accounting.json").unlink()  # a look at the folder would now find an open job
    assert "no jobs since yesterday" in ok("ps").out
    assert "train" in ok("ps", "-a").out
