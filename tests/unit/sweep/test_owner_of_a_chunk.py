"""Which array runs a chunk of cells: the first to make the link `owner`, on every file system."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest
from commandline import within
from stub_slurm import install

from hpcjobs.sweeps.folder import NOBODY, SweepFolder


@pytest.fixture
def chunk(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A submitted chunk of two cells. Its tasks are run by hand, without srun since they are packed.

    `ln` fails as on a file system without hard links.
    """
    stubs = here / "stubs"
    install(monkeypatch, stubs, limit=100)
    no_hard_links = (
        "#!/bin/sh\ncase $1 in -s*) exec /bin/ln \"$@\" ;; esac\necho 'Operation not permitted' >&2\nexit 1\n"
    )
    (stubs / "ln").write_text(no_hard_links)
    (stubs / "ln").chmod(0o755)
    partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    (here / "stub.yaml").write_text(json.dumps({"partitions": partitions, "run_root": "runs"}))
    (here / "count.sh").write_text('#!/bin/sh\necho "$HPCJOBS_PARAM_I" >>ran\n')
    (here / "count.sh").chmod(0o755)
    arguments = ("--site", "./stub.yaml", "--name", "s", "-t", "5m", "--set", "i=1,2", "--pack", "2", "./count.sh")
    answer = within("sweep", *arguments)
    assert answer.code == 0, answer
    return here / "runs/sweep-s/chunks/0001"


def run_task(chunk: Path, array: str) -> subprocess.CompletedProcess[str]:
    ids = {
        "SLURM_JOB_ID": array,
        "SLURM_ARRAY_JOB_ID": array,
        "SLURM_ARRAY_TASK_ID": "0",
        "SLURM_ARRAY_TASK_COUNT": "1",
    }
    host = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURMD_NODENAME": "a"}
    return subprocess.run(
        ["bash", chunk / "job.sh"], env={**os.environ, **ids, **host}, capture_output=True, text=True, check=False
    )


def ran() -> list[str]:
    path = Path("ran")
    return path.read_text().split() if path.exists() else []


def test_the_cells_run_where_hard_links_fail(chunk: Path) -> None:
    done = run_task(chunk, "101")
    assert (done.returncode, sorted(ran())) == (0, ["1", "2"]), done
    assert os.readlink(chunk / "owner") == "101"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_cell_whose_end_could_not_be_written_is_done_once_its_task_is_run_again(chunk: Path, is_there: bool) -> None:
    """Else every resume would submit it: it is done, and nothing says so."""
    run_task(chunk, "101")
    states = list(chunk.parent.parent.glob("cells/*/state.json"))
    before = json.loads(states[0].read_text())
    for state in states[1:]:
        state.write_text(json.dumps(before | {"state": "RUNNING", "ended": None}))
        if not is_there:
            state.unlink()
    done = run_task(chunk, "101")
    assert (done.returncode, sorted(ran())) == (0, ["1", "2"]), done
    assert [json.loads(state.read_text())["state"] for state in states] == ["COMPLETED"] * 2
    assert json.loads(states[0].read_text()) == before


def test_a_second_array_for_the_same_cells_leaves_and_runs_none(chunk: Path) -> None:
    (chunk / "owner").symlink_to("100")
    done = run_task(chunk, "101")
    assert (done.returncode, ran()) == (0, []), done
    assert "these cells belong to 100" in done.stderr


def test_a_second_array_leaves_also_where_an_older_version_wrote_the_first(chunk: Path) -> None:
    (chunk / "owner").write_text("100\n")
    done = run_task(chunk, "101")
    assert (done.returncode, ran()) == (0, []), done


def test_a_chunk_whose_owner_a_kill_or_a_full_disk_left_empty_is_submitted_anew(chunk: Path) -> None:
    """As an older version left it: created, and not written."""
    (chunk / "owner").touch()
    (chunk / "submitted.json").unlink()
    (chunk.parents[3] / "stubs" / "queue").write_text("")
    answer = within("sweep", "resume", "s", "--json")
    assert answer.code == 0, answer
    assert answer.json["cells"] == 2, answer
    assert (chunk.parent / "0002" / "submitted.json").exists()


def test_an_owner_that_stays_empty_is_an_error(chunk: Path) -> None:
    """As a quota leaves it: nothing was run, so nothing may say COMPLETED."""
    (chunk / "owner").touch()
    done = run_task(chunk, "101")
    assert (done.returncode, ran()) == (1, []), done
    assert "is empty" in done.stderr
    assert json.loads((chunk / "0/state.json").read_text())["state"] == "FAILED"


def test_a_chunk_is_given_up_where_hard_links_fail_and_only_if_no_array_has_it(
    chunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = SweepFolder(chunk.parents[1])
    (only,) = folder.chunks()
    assert folder.give_up(only) == NOBODY
    assert run_task(chunk, "101").returncode == 0
    assert ran() == []
    (chunk / "owner").unlink()
    (chunk / "owner").symlink_to("101")
    assert folder.give_up(only) == "101"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_without_file_locks_a_sweep_is_submitted_with_a_warning(
    chunk: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    answer = within("sweep", "resume", "s")
    assert answer.code == 0, answer
    assert answer.err.count("has no file locks: do not resume sweep sweep-s twice at the same time") == 1, answer
    assert within("sweep", "status", "s").code in (0, 1)
