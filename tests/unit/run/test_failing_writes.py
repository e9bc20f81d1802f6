"""Commands whose n-th write fails, or that are killed there: they say so, and the next one does the rest."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from commandline import Answer, ok, within
from slurm_with_memory import SlurmWithMemory, install

from hpcjobs.run import archive

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")
FAULTS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EACCES, None]
NAMES = ["KILL" if fault is None else errno.errorcode[fault] for fault in FAULTS]


class Faulty(NamedTuple):
    """One command with a fault: its answer (None: it was killed), and whether it came as far as the fault."""

    answer: Answer | None
    is_faulty: bool


def call(fault: int | None, at: int, *arguments: str) -> Faulty:
    """``hpcjobs ARGUMENTS`` in a child whose write ``at``, from 0, has the error ``fault``, or None: SIGKILL."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def disturb(event: str, values: tuple[object, ...]) -> None:
            nonlocal count
            flags = values[2] if event == "open" else 0
            is_write = isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if (is_write or event in CHANGES) and values[0] != os.devnull:
                count += 1
                if count - 1 == at:
                    if fault is None:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise OSError(fault, os.strerror(fault), *(() if isinstance(values[0], int) else values[:1]))

        try:
            sys.addaudithook(disturb)
            try:
                answer = within(*arguments)
            except BaseException:
                answer = Answer(70, "", traceback.format_exc())
            os.write(writing, json.dumps([*vars(answer).values(), count > at]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        assert fault is None, "the child wrote no answer"
        return Faulty(None, True)
    code, out, err, is_faulty = json.loads(text)
    return Faulty(Answer(code, out, err), is_faulty)


def call_each(fault: int | None, prepare: Callable[[], tuple[str, ...]]) -> Iterator[Faulty]:
    """The command that ``prepare`` gives, with each of its writes failing in turn."""
    at, is_faulty = 0, True
    while is_faulty:
        done = call(fault, at, *prepare())
        if done.answer is not None:
            assert "Traceback" not in done.answer.err, (at, done)
            assert done.answer.code not in (2, 70), (at, done)
        yield done
        at, is_faulty = at + 1, done.is_faulty
    assert at > 1, "the command writes something"


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmWithMemory:
    partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    (here / "stub.yaml").write_text(json.dumps({"partitions": partitions, "run_root": "runs"}))
    monkeypatch.setenv("HPCJOBS_SITE", "./stub.yaml")
    return install(monkeypatch, tmp_path / "slurm")


def submit(name: str) -> tuple[str, Path]:
    job = ok("submit", "--name", name, "--json", "true").json
    return str(job["job_id"]), Path(job["run_dir"])


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_cancellation_with_a_failing_write_says_so_or_has_cancelled(
    fault: int | None, slurm: SlurmWithMemory
) -> None:
    """Of a job that runs, and may request its own requeue: the cancellation is noted in its folder."""
    ids: list[str] = []

    def prepare() -> tuple[str, ...]:
        slurm.clear(state="RUNNING")
        job_id, run_dir = submit("c")
        (run_dir / "control").mkdir()
        ids.append(job_id)
        return "cancel", job_id

    for done in call_each(fault, prepare):
        if done.answer is not None and done.answer.code == 0:
            assert slurm.jobs()[ids[-1]][0] == "CANCELLED", done
        within("cancel", ids[-1])
        assert slurm.jobs()[ids[-1]][0] == "CANCELLED"
        (row,) = [job for job in ok("ps", "--json").json if job["record"]["job_id"] == ids[-1]]
        assert row["record"]["state"] == "CANCELLED"


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_prune_with_a_failing_write_removes_nothing_else_and_the_next_one_removes_the_rest(
    fault: int | None, slurm: SlurmWithMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "FINAL_AFTER_S", 0.0)  # else the nodes may still be cleaned up
    slurm.clear()
    waiting, stays = submit("waits")
    contents, old = files(stays), list[Path]()

    def prepare() -> tuple[str, ...]:
        (slurm.folder / "state").write_text("COMPLETED")
        old[:] = [submit(f"old{number}")[1] for number in range(2)]
        return "prune", "--remove", "--older-than", "0s"

    for done in call_each(fault, prepare):
        if done.answer is not None and done.answer.code == 0:
            assert not any(folder.exists() for folder in old), done
        ok("prune", "--remove", "--older-than", "0s")
        assert not any(folder.exists() for folder in old), done
        assert files(stays) == contents
        assert [job["record"]["job_id"] for job in ok("ps", "--json").json] == [waiting]
        left = {path.name for path in stays.parent.iterdir()}
        assert left - {".gitignore"} == {stays.name}, done


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_an_archive_with_a_failing_write_is_whole_or_not_there(
    fault: int | None, slurm: SlurmWithMemory, here: Path
) -> None:
    slurm.clear(state="COMPLETED")
    job_id, run_dir = submit("a")
    target, folder = here / "a.tar", here / "archives"
    folder.mkdir()
    target = folder / "a.tar"

    def prepare() -> tuple[str, ...]:
        target.unlink(missing_ok=True)
        return "archive", job_id, "--output", str(target)

    for done in call_each(fault, prepare):
        has_succeeded = done.answer is not None and done.answer.code == 0
        assert target.exists() or not has_succeeded, done
        if target.exists():
            with tarfile.open(target) as archive:
                assert f"{run_dir.name}/job.sh" in archive.getnames(), done
        for part in folder.glob(".a.tar.*") if done.answer is None else ():
            part.unlink()  # what was killed leaves this, under a name of its own
        assert {path.name for path in folder.iterdir()} <= {target.name}, done


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_sweep_that_is_resumed_with_a_failing_write_has_each_cell_once_after_the_next_resume(
    fault: int | None, slurm: SlurmWithMemory
) -> None:
    ended = list[str]()

    def prepare() -> tuple[str, ...]:
        slurm.clear(state="COMPLETED")
        name = f"s{len(ended)}"
        ended.append(name)
        ok("sweep", "--name", name, "--set", "x=1..3", "true")
        (slurm.folder / "state").write_text("PENDING")
        return "sweep", "resume", name

    for _ in call_each(fault, prepare):
        ok("sweep", "resume", ended[-1])
        waiting = [run_dir for state, run_dir in slurm.jobs().values() if state == "PENDING"]
        cells = [cell for run_dir in waiting for cell in json.loads((run_dir / "chunk.json").read_text())["cells"]]
        assert len(cells) == len(set(cells)) == 3, cells


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_trust_with_a_failing_write_is_given_or_not_and_takes_none_away(fault: int | None, here: Path) -> None:
    (here / "first.yaml").write_text("{partitions: {a: {nodes: 1, node: {cpus: 1}}}, setup: [date]}\n")
    ok("sites", "trust", "first.yaml")
    number = 0

    def prepare() -> tuple[str, ...]:
        nonlocal number
        number += 1
        (here / "second.yaml").write_text(
            f"{{partitions: {{a: {{nodes: {number}, node: {{cpus: 1}}}}}}, setup: [id]}}\n"
        )
        return "sites", "trust", "second.yaml"

    for done in call_each(fault, prepare):
        ok("submit", "--site", "./first.yaml", "--dry-run", "true")
        if done.answer is not None and done.answer.code == 0:
            ok("submit", "--site", "./second.yaml", "--dry-run", "true")
        ok("sites", "trust", "second.yaml")
        ok("submit", "--site", "./second.yaml", "--dry-run", "true")
