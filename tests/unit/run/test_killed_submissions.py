"""A job that the scheduler has accepted is known to every verb, wherever its submission was killed or interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import hpcjobs, start, within, within_streams
from slurm_with_memory import SlurmWithMemory, install

from hpcjobs.run.index import entries, index_dir
from hpcjobs.scheduler.local.client import state_folder

WRITES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link", "subprocess.Popen")


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmWithMemory:
    partitions = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    (here / "stub.yaml").write_text(json.dumps({"partitions": partitions, "run_root": "runs"}))
    monkeypatch.setenv("HPCJOBS_SITE", "./stub.yaml")
    monkeypatch.setattr("hpcjobs.scheduler.slurm.client._PAUSES_S", (0.01,))
    return install(monkeypatch, tmp_path / "slurm")


def is_write(event: str, arguments: tuple[object, ...]) -> bool:
    if event == "open":
        flags = arguments[2]
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in WRITES


def interrupt(number: int, at: int, *arguments: str) -> bool:
    """Run ``hpcjobs ARGUMENTS`` in a child, to which signal ``number`` comes right before its write ``at``, from 0.

    False: it has made fewer writes.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        for one in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        count = 0

        def look(event: str, values: tuple[object, ...]) -> None:
            nonlocal count
            if is_write(event, values):
                count += 1
                if count - 1 == at:
                    os.kill(os.getpid(), number)

        sys.addaudithook(look)
        try:
            within_streams(*arguments)
        finally:
            os.write(writing, str(count).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return not text or int(text) > at


def lines(*arguments: str) -> str:
    answer = within(*arguments)
    assert "Traceback" not in answer.err, answer
    assert answer.code not in (2, 6, 70), answer
    return answer.out


VERBS: dict[str, Callable[[str, Path], bool]] = {
    "ps": lambda job_id, run_dir: any(
        row["record"]["job_id"].split("_")[0] == job_id and row["run_dir"] == str(run_dir)
        for row in json.loads(lines("ps", "--json"))
    ),
    "show ID": lambda job_id, run_dir: f"job {job_id} " in lines("show", job_id),
    "show FOLDER": lambda job_id, run_dir: f"job {job_id} " in lines("show", str(run_dir)),
    "wait": lambda job_id, run_dir: job_id in within("wait", "--timeout", "0.01", job_id).err,
    "cancel ID": lambda job_id, run_dir: f"cancelled {job_id}" in lines("cancel", job_id),
    "cancel FOLDER": lambda job_id, run_dir: f"cancelled {job_id}" in lines("cancel", str(run_dir)),
    "cancel --all": lambda job_id, run_dir: job_id in lines("cancel", "--all").split(),
}

COMMANDS = {
    "submit": ("submit", "true"),
    "array": ("submit", "--array", "0-2", "true"),
    "rerun": ("rerun", "again"),
    "sweep": ("sweep", "--name", "s", "--set", "x=1,2", "true"),
}


EACH = [("submit", one) for one in ("KILL", "INT", "TERM", "HUP")]
EACH += [("array", "KILL"), ("rerun", "KILL"), ("rerun", "HUP"), ("sweep", "KILL"), ("sweep", "INT")]


@pytest.mark.parametrize(("command", "signal_name"), EACH)
def test_a_job_whose_submission_was_interrupted_at_any_write_is_known_to_every_verb(
    slurm: SlurmWithMemory, command: str, signal_name: str, here: Path
) -> None:
    assert within("submit", "--name", "again", "true").code == 0  # also imports what the children need
    number, verbs = getattr(signal, f"SIG{signal_name}"), list(VERBS)
    unknown, accepted, at = [], 0, 0
    while interrupt(number, at, *COMMANDS[command]):
        for job_id, (_, run_dir) in slurm.jobs().items():
            verb = verbs[accepted % len(verbs)]
            accepted += 1
            if not VERBS[verb](job_id, run_dir):
                unknown.append((at, verb, job_id))
        slurm.clear()
        shutil.rmtree(index_dir() / "begun", ignore_errors=True)  # else the next one first looks for a job of this one
        at += 1
    assert unknown == []
    assert accepted >= 5, (accepted, at)


@pytest.mark.parametrize("command", ["submit", "array"])
def test_a_command_that_is_sent_again_after_a_kill_at_any_write_makes_one_job(
    slurm: SlurmWithMemory, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert within("submit", "--name", "again", "true").code == 0
    slurm.clear(state="COMPLETED")
    at, wrong, goes_on = 0, [], True
    while goes_on:
        monkeypatch.setenv("HPCJOBS_SUBMISSION", f"token{at}")
        goes_on = interrupt(signal.SIGKILL, at, *COMMANDS[command])
        answer = within(*COMMANDS[command][:1], "--parsable", *COMMANDS[command][1:])
        if answer.code != 0 or list(slurm.jobs()) != [answer.out.strip()]:
            wrong.append((at, answer, slurm.jobs()))
        slurm.clear(state="COMPLETED")
        at += 1
    assert wrong == []


@pytest.mark.parametrize("signal_name", ["INT", "TERM", "HUP"])
def test_a_signal_that_comes_while_sbatch_answers_waits_until_the_job_is_recorded(
    slurm: SlurmWithMemory, signal_name: str
) -> None:
    slurm.clear(interruption=signal_name)
    process = start("submit", "true", start_new_session=True)
    err = process.communicate(timeout=60)[1]
    ((job_id, (_, run_dir)),) = slurm.jobs().items()
    assert process.returncode == (130 if signal_name == "INT" else -getattr(signal, f"SIG{signal_name}")), err
    assert json.loads((run_dir / "submitted.json").read_text())["job_id"] == job_id
    assert f"job {job_id} was submitted before: hpcjobs cancel {job_id} ends it" in err
    assert f"cancelled {job_id}" in within("cancel", "--all").out


def test_ctrl_c_while_slurm_does_not_answer_says_that_the_job_may_have_been_taken(slurm: SlurmWithMemory) -> None:
    away = "echo 'error: Socket timed out on send/recv operation' >&2; exit 1"
    slurm.clear(interruption="INT", answer=away)
    squeue = slurm.folder / "squeue"
    there = squeue.read_text()
    squeue.write_text(f"#!/bin/sh\n{away}\n")
    process = start("submit", "--name", "mine", "true", start_new_session=True)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert "interrupted, and Slurm may have taken job mine: look with `hpcjobs ps`" in err
    squeue.write_text(there)
    assert [row["record"]["job_id"] for row in json.loads(lines("ps", "--json"))] == list(slurm.jobs())


def test_a_job_that_is_found_later_has_the_time_of_its_submission(slurm: SlurmWithMemory) -> None:
    """By which its record in the accounting is known: that has no script."""
    slurm.clear(interruption="KILL")
    start("submit", "true", start_new_session=True).communicate(timeout=60)
    ((job_id, _),) = slurm.jobs().items()
    (path,) = (index_dir() / "begun").iterdir()
    begun = json.loads(path.read_text())
    path.write_text(json.dumps(begun | {"when": begun["when"] - 3600}))
    (row,) = json.loads(lines("ps", "--json"))
    assert row["record"]["job_id"] == job_id
    (entry,) = entries()
    assert abs(entry.submitted - (begun["when"] - 3600)) < 1


TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
LOST_ANSWERS = (TIMED_OUT, "exit 0", "kill -KILL $$", "echo 'Welcome to the cluster'")


@pytest.mark.parametrize("answer", LOST_ANSWERS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_that_ended_before_its_lost_answer_was_missed_is_not_submitted_again(
    slurm: SlurmWithMemory, command: str, answer: str
) -> None:
    assert within("submit", "--name", "again", "true").code == 0
    slurm.clear(state="COMPLETED", answer=answer)
    result = within(*COMMANDS[command])
    ((job_id, (_, run_dir)),) = slurm.jobs().items()
    assert result.code == 0, result
    assert f"job {job_id} " in lines("show", str(run_dir))


def test_an_array_that_slurm_has_forgotten_is_found_by_what_its_tasks_wrote(
    slurm: SlurmWithMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_SUBMISSION", "token")
    slurm.clear(state="COMPLETED", interruption="KILL")
    start("submit", "--array", "0-2", "true", start_new_session=True).communicate(timeout=60)
    ((job_id, (_, run_dir)),) = slurm.jobs().items()
    ids = {"SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_ID": "777", "SLURM_NNODES": "1"}
    place = {"SLURM_JOB_NODELIST": "a", "SLURMD_NODENAME": "a", "SLURM_JOB_NUM_NODES": "1"}
    subprocess.run(["bash", run_dir / "job.sh"], env={**os.environ, **ids, **place}, capture_output=True, check=False)
    slurm.clear()  # neither squeue nor sacct knows it any more
    answer = hpcjobs("submit", "--parsable", "--array", "0-2", "true")
    assert (answer.code, answer.out.strip()) == (0, job_id), answer
    assert slurm.jobs() == {}


def accepted_here() -> dict[str, str]:
    """Id -> run folder of every job that the queue of this machine has accepted."""
    root = state_folder()
    folders = [folder for folder in (root / "jobs").glob("L*") if (folder / "request.json").exists()]
    taken = [f for f in folders if (root / "active" / f.name).exists() or (f / "ended.json").exists()]
    return {folder.name: json.loads((folder / "request.json").read_text())["run_dir"] for folder in taken}


@pytest.mark.parametrize("signal_name", ["KILL", "TERM"])
def test_a_local_job_whose_submission_was_interrupted_at_any_write_is_known_to_every_verb(
    here: Path, signal_name: str
) -> None:
    submit = ("submit", "--site", "local", "-t", "5m", "true")
    assert within(*submit).code == 0
    number, at, unknown = getattr(signal, f"SIG{signal_name}"), 0, []
    seen = set(accepted_here())
    while interrupt(number, at, *submit):
        for job_id in accepted_here().keys() - seen:
            run_dir = accepted_here()[job_id]
            known = [f"job {job_id} " in lines("show", job_id), f"job {job_id} " in lines("show", run_dir)]
            known.append(within("wait", job_id, "--timeout", "60").code in (0, 1))
            known.append(any(row["run_dir"] == run_dir for row in json.loads(lines("ps", "-a", "--json"))))
            if not all(known):
                unknown.append((at, job_id, known))
            seen.add(job_id)
        at += 1
    assert unknown == []
    assert len(seen) > 2
