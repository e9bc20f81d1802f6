"""Sweeps on a real Slurm: cut into arrays, resumed, killed in the middle, and never run twice."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import submitit
from commandline import Answer, hpcjobs, ok, start
from waiting import eventually

import hpcjobs as api
from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.folder import Daemon, alive, folder_at, recorded_daemons, spawn
from hpcjobs.site.machine import current_sandbox

SITE = ("--site", "tu-hpc", "--time", "5m")
COUNT = """#!/bin/bash
echo "$HPCJOBS_PARAM_I" >>"$PWD/${RAN:-ran}"
[ ! -e "$PWD/broken-$HPCJOBS_PARAM_I" ]
"""


@pytest.fixture
def folder(sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    record = current_sandbox()
    assert record is not None
    monkeypatch.setenv("SLURM_CONF", record.slurm_conf)
    (workdir / "count.sh").write_text(COUNT)
    (workdir / "count.sh").chmod(0o755)
    yield workdir
    slurm("scancel", "--me")


def sweep(*arguments: str, code: int = 0) -> Answer:
    answer = hpcjobs("sweep", *arguments)
    assert answer.code == code, answer
    return answer


def rows(name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = sweep("results", name, "--json").json
    return [{**cell, **cell["params"], **cell["measured"]} for cell in cells]


def states(name: str) -> dict[str, int]:
    document: dict[str, int] = sweep("status", name, "--json").json["states"]
    return document


def slurm(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def end(name: str) -> Daemon:
    """A daemon of the sandbox, ended as an administrator would."""
    daemon = next(daemon for daemon in recorded_daemons(folder_at(None)) if daemon.name == name)
    os.kill(daemon.pid, signal.SIGTERM)
    eventually(lambda: not alive(daemon))
    return daemon


def test_a_real_trainer_with_killed_and_failing_cells_is_resumed_where_it_must_be(folder: Path) -> None:
    """Two tasks are killed and one cell cannot work: resume runs these three and no other."""
    cells = [{"lr": 0.01, "seed": 1}, {"lr": 0.01, "seed": 2}, {"lr": 0, "seed": 1}, {"lr": 0.03, "seed": 1}]
    (folder / "sweep.yaml").write_text(
        json.dumps({"program": ["ddp", "--steps", "3"], "cells": cells, "name": "digits"})
    )
    begun = sweep(*SITE, "--sweep", "sweep.yaml", "--no-check", "--json").json
    (array,) = begun["arrays"]
    eventually(lambda: states("digits").get("RUNNING", 0) >= 2)
    slurm("scancel", "--full", "--signal=KILL", f"{array}_0", f"{array}_1")
    eventually(lambda: not slurm("squeue", "-h", "-j", array).strip())
    ended = states("digits")
    # What a SIGKILL of a task is called depends on Slurm's version, and on whether its script saw the step's end.
    assert (ended["COMPLETED"], sum(ended.values())) == (1, 4), ended
    assert sweep("resume", "digits", "--wait", "--json", code=1).json["cells"] == 3
    result = rows("digits")
    assert [row["state"] for row in result] == ["COMPLETED", "COMPLETED", "FAILED", "COMPLETED"]
    assert all(row["loss"] > 0 for row in result if row["state"] == "COMPLETED")
    best = sweep("results", "digits", "--min", "loss", "--json").json
    assert best["measured"]["loss"] == min(row["loss"] for row in result if "loss" in row)


def test_a_changed_grid_keeps_what_is_done_and_resume_runs_only_what_failed(folder: Path) -> None:
    (folder / "broken-2").touch()
    sweep(*SITE, "--name", "grow", "--set", "i=1,2", "--wait", "./count.sh", code=1)
    assert (
        sweep(*SITE, "--name", "grow", "--set", "i=0..3", "--json", "--wait", "./count.sh", code=1).json["cells"] == 3
    )
    (folder / "broken-2").unlink()
    assert sweep("resume", "grow", "--json", "--wait").json["cells"] == 1
    nothing = sweep("resume", "grow", "--json").json
    assert (nothing["arrays"], nothing["cells"], nothing["done"]) == ([], 0, 4)
    assert sorted((folder / "ran").read_text().split()) == ["0", "1", "2", "2", "2", "3"]


def test_the_throttle_is_never_exceeded(folder: Path) -> None:
    """Twelve cells, three at once, by the accounting's own start and end times."""
    sweep(*SITE, "--name", "few", "--set", "i=1..12", "--max-parallel", "3", "--wait", "sleep", "0.{i}")
    assert most_at_once("few", tasks=12) <= 3


def most_at_once(name: str, *, tasks: int) -> int:
    """How many of a sweep's array tasks ran at the same time; awaits the accounting, which follows by some seconds."""
    arrays = {row["job_id"].split("_")[0] for row in rows(name)}

    def spans() -> list[tuple[int, int]]:
        out = subprocess.run(
            ["sacct", "-X", "-n", "-P", "-o", "Start,End", "-j", ",".join(arrays)],
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        return [(int(a), int(b)) for a, b in (line.split("|") for line in out.split()) if b.isdigit()]

    eventually(lambda: len(spans()) == tasks)
    # An end and the start it makes room for fall into the same second: only whole seconds within count.
    complete = [(begun + 1, end) for begun, end in spans() if end > begun]
    moves = sorted([(begun, 1) for begun, _ in complete] + [(end, -1) for _, end in complete])
    return max(itertools.accumulate(step for _, step in moves))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_cells_are_all_done_by_the_arrays_alone(folder: Path) -> None:
    """MaxArraySize is 1001: 2000 tasks of five cells make two arrays, and no process stays on the login node."""
    sweep(*SITE, "--name", "many", "--set", "i=0..9999", "--pack", "5", "--max-parallel", "8", "./count.sh")
    eventually(lambda: states("many") == {"COMPLETED": 10_000}, timeout_s=3500)
    assert sorted(map(int, (folder / "ran").read_text().split())) == list(range(10_000))
    assert most_at_once("many", tasks=2000) <= 8


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_trainings_with_killed_and_failing_ones_are_resumed_where_they_must_be(folder: Path) -> None:
    """Two tasks are killed and one cell cannot train: resume runs these three and no other."""
    cells = [{"lr": lr, "seed": seed} for lr in (0.003, 0.01, 0.03, 0.1) for seed in range(50)]
    cells[7]["lr"] = 0
    (folder / "sweep.yaml").write_text(
        json.dumps({"program": ["ddp", "--workload", "mnist", "--steps", "10"], "cells": cells, "name": "digits"})
    )
    (array,) = sweep(*SITE, "--sweep", "sweep.yaml", "--no-check", "--max-parallel", "2", "--json").json["arrays"]
    killed: set[str] = set()
    while len(killed) < 2:
        eventually(lambda: states("digits").get("RUNNING", 0) > 0)
        running = slurm("squeue", "-h", "-t", "R", "-o", "%i", "-j", array).split()
        for task in set(running) - killed:
            if len(killed) < 2:
                slurm("scancel", "--signal=KILL", "--full", task)
                killed.add(task)
    eventually(lambda: not {"PENDING", "RUNNING"} & states("digits").keys(), timeout_s=3000)
    bad = [row for row in rows("digits") if row["state"] != "COMPLETED"]
    assert len(bad) == 3
    assert sweep("resume", "digits", "--json").json["cells"] == 3
    eventually(lambda: not {"PENDING", "RUNNING"} & states("digits").keys())
    assert len(rows("digits")) == 200
    assert states("digits") == {"COMPLETED": 199, "FAILED": 1}
    assert {row["lr"] for row in rows("digits") if row["state"] == "FAILED"} == {0}


@pytest.mark.long
def test_a_hundred_cells_finish_once_while_the_controller_is_started_anew_and_accounting_is_away(
    folder: Path, sandbox: Sandbox
) -> None:
    """Somebody waits all the time, and the sweep's own tail submits what the queue has no room for."""
    (folder / "site_configs").mkdir()
    shipped = (Path(api.__file__).parent.parent / "site_configs" / "tu-hpc.yaml").read_text()
    (folder / "site_configs" / "tu-hpc.yaml").write_text(shipped + "max_submit_jobs: 40\n")
    ok("sites", "trust", str(folder / "site_configs" / "tu-hpc.yaml"))
    (folder / "slow.sh").write_text(COUNT + "sleep 3\n")
    (folder / "slow.sh").chmod(0o755)
    arguments = (*SITE, "--name", "hundred", "--set", "i=0..99", "--max-parallel", "4")
    waiting = start("sweep", *arguments, "--wait", "./slow.sh", cwd=folder)
    ran = folder / "ran"
    try:
        eventually(lambda: ran.exists() and len(ran.read_text().split()) >= 8)
        end("slurmdbd")
        away = time.monotonic()
        before = len(ran.read_text().split())
        controller = end("slurmctld")
        spawn(folder_at(None), controller.name, controller.argv)
        eventually(lambda: time.monotonic() > away + 60)
        assert len(ran.read_text().split()) > before
    finally:
        sandboxes.up(sandbox.shape)
    out, err = waiting.communicate(timeout=500)
    assert waiting.returncode == 0, (out, err)
    assert states("hundred") == {"COMPLETED": 100}
    assert sorted(map(int, ran.read_text().split())) == list(range(100))


def test_more_cells_than_an_index_goes_become_several_arrays_under_one_throttle(folder: Path) -> None:
    """MaxArraySize is 1001: two arrays, the second after the first; nothing runs, and cancel ends both."""
    begun = sweep(
        *SITE, "-o", "hold", "--name", "wide", "--set", "i=0..1999", "--max-parallel", "4", "--json", "true"
    ).json
    first, second = begun["arrays"]
    row = slurm("squeue", "-h", "-o", "%i %r %E", "-j", f"{first},{second}").splitlines()
    assert any(line.startswith(f"{first}_[0-999%4]") for line in row)
    assert any(f"{second}_[0-999%4]" in line and f"afterany:{first}" in line for line in row)
    assert states("wide") == {"PENDING": 2000}
    assert sorted(sweep("cancel", "wide", "--json").json["cancelled"]) == [first, second]
    eventually(lambda: not slurm("squeue", "-h", "-j", f"{first},{second}").strip())
    assert states("wide").get("PENDING", 0) == 0


def test_what_the_queue_has_no_room_for_is_submitted_by_the_sweep_itself(folder: Path) -> None:
    """Six jobs may queue: ten cells go in three arrays, and no process stays behind on the login node."""
    (folder / "site_configs").mkdir()
    shipped = (Path(api.__file__).parent.parent / "site_configs" / "tu-hpc.yaml").read_text()
    (folder / "site_configs" / "tu-hpc.yaml").write_text(shipped + "max_submit_jobs: 6\n")
    ok("sites", "trust", str(folder / "site_configs" / "tu-hpc.yaml"))
    begun = sweep(*SITE, "--name", "tail", "--set", "i=0..9", "--json", "./count.sh").json
    assert begun["cells"] < 10
    assert begun["cells"] + begun["waiting"] == 10
    eventually(lambda: states("tail") == {"COMPLETED": 10})
    assert sorted((folder / "ran").read_text().split(), key=int) == [str(i) for i in range(10)]


@pytest.fixture
def manage() -> Iterator[Callable[..., None]]:
    """Sets limits of root's accounts (``sacctmgr``), and takes them back."""
    touched: set[str] = set()

    def change(name: str, value: int) -> None:
        touched.add(name)
        slurm("sacctmgr", "--immediate", "--quiet", "modify", "user", "root", "set", f"{name}={value}")

    yield change
    for name in sorted(touched):
        change(name, -1)


def test_a_sweep_larger_than_an_account_may_submit_is_cut_until_it_fits_and_runs_to_its_end(
    folder: Path, manage: Callable[..., None]
) -> None:
    """No file names the limit: Slurm's refusal does, and an array of the size it takes follows."""
    manage("MaxSubmitJobs", 6)
    begun = sweep(*SITE, "--name", "fit", "--set", "i=0..9", "--json", "./count.sh").json
    assert 0 < begun["cells"] < 10
    assert begun["cells"] + begun["waiting"] == 10
    eventually(lambda: states("fit") == {"COMPLETED": 10})
    assert sorted((folder / "ran").read_text().split()) == [str(i) for i in range(10)]


def test_a_sweep_that_its_account_refuses_for_its_size_ends_with_slurms_words(
    folder: Path, manage: Callable[..., None]
) -> None:
    """Slurm has one text for all limits of an account; this one no waiting would change."""
    slurm("sacctmgr", "--immediate", "--quiet", "modify", "qos", "normal", "set", "MaxTRESPerJob=cpu=1")
    slurm("sacctmgr", "--immediate", "--quiet", "modify", "qos", "normal", "set", "Flags=DenyOnLimit")
    try:
        answer = sweep(*SITE, "--name", "long", "--set", "i=0..9", "-c", "2", "./count.sh", code=7)
    finally:
        slurm("sacctmgr", "--immediate", "--quiet", "modify", "qos", "normal", "set", "MaxTRESPerJob=cpu=-1")
    assert "QOSMaxCpuPerJobLimit" in answer.err
    assert not slurm("squeue", "--me", "-h").strip()
    assert states("long") == {"MISSING": 10}


def test_killing_the_submitter_anywhere_loses_no_cell_and_runs_none_twice(folder: Path) -> None:
    """SIGKILL at random moments between the first import and the last rename; resume finishes each sweep."""
    draw, names = random.Random(5), [f"kill{n}" for n in range(10)]
    arguments = {
        name: (*SITE, "--name", name, "--set", "i=0..3", "--env", f"RAN=ran-{name}", "./count.sh") for name in names
    }
    for name in names:
        process = start("sweep", *arguments[name])
        time.sleep(draw.uniform(0.05, 0.6))
        process.kill()
        process.communicate()
        sweep(*arguments[name])
    for name in names:
        eventually(lambda name=name: states(name) == {"COMPLETED": 4})  # type: ignore[misc]
        assert sorted((folder / f"ran-{name}").read_text().split()) == ["0", "1", "2", "3"]


def test_a_cell_told_to_save_is_requeued_and_goes_on_while_others_are_left_alone(folder: Path) -> None:
    """Of two cells one is told; it counts on where it was, and its state is never a failure."""
    (folder / "count.py").write_text(
        "import os, pathlib, time\n"
        "from hpcjobs.runtime import signals\n"
        "stop, kept = signals.listen(), pathlib.Path(os.environ['HPCJOBS_RUN_DIR'], 'kept')\n"
        "begun = int(kept.read_text()) if kept.exists() else 0\n"
        "kept.with_name('listening').touch()\n"
        "while os.environ['HPCJOBS_PARAM_I'] == '1' and begun == 0:\n"
        "    time.sleep(0.05)\n"
        "    if stop.requested:\n"
        "        kept.write_text('7')\n"
        "        signals.leave(7)\n"
        "kept.with_name('summary.json').write_text('{\"begun\": %d}' % begun)\n"
    )
    sweep(
        "--site",
        "tu-hpc",
        "--time",
        "30m",
        "--name",
        "again",
        "--set",
        "i=0,1",
        "--retries",
        "on",
        "--pass",
        "env",
        "count.py",
    )
    printed_lines = rows("again")[1]
    second = Path(printed_lines["folder"])
    eventually((second / "listening").exists)
    slurm("scancel", "--batch", "--signal=USR1", printed_lines["job_id"])
    eventually((second / "kept").exists)
    eventually(lambda: states("again") == {"COMPLETED": 2})
    assert [row["begun"] for row in rows("again")] == [0, 7]


def test_packed_cells_may_run_at_once_each_with_a_port_and_threads_of_its_own(folder: Path) -> None:
    """Each binds its port and waits there for the other three: one after the other they would never end."""
    (folder / "meet.py").write_text(
        "import os, pathlib, socket, time\n"
        "with socket.create_server(('', int(os.environ['MASTER_PORT']))):\n"
        "    pathlib.Path(f'here-{os.environ[\"HPCJOBS_PARAM_I\"]}').write_text(os.environ['OMP_NUM_THREADS'])\n"
        "    while len(list(pathlib.Path().glob('here-*'))) < 4:\n"
        "        time.sleep(0.05)\n"
    )
    at_once = ("--pack", "4", "--pack-parallel", "4", "-c", "8", "--max-parallel", "4", "--pass", "env")
    sweep(*SITE, "--name", "lanes", "--set", "i=0..3", *at_once, "--wait", "meet.py")
    assert [(folder / f"here-{i}").read_text() for i in range(4)] == ["2"] * 4
    assert len({row["job_id"] for row in rows("lanes")}) == 1


def test_packed_cells_have_their_own_result_and_log_and_fail_alone(folder: Path) -> None:
    (folder / "broken-4").touch()
    begun = sweep(
        *SITE, "--name", "packed", "--set", "i=0..6", "--pack", "3", "--json", "--wait", "./count.sh", code=1
    ).json
    assert len(begun["arrays"]) == 1
    assert len({row["job_id"] for row in rows("packed")}) == 3
    assert {row["i"]: row["state"] for row in rows("packed") if row["state"] != "COMPLETED"} == {4: "FAILED"}
    assert all(Path(row["log"]).is_file() for row in rows("packed"))
    assert len((folder / "ran").read_text().split()) == 7


def test_a_swept_function_gives_results_and_tracebacks(folder: Path) -> None:
    def square(x: int) -> dict[str, int]:
        if x == 2:
            raise ValueError("two is odd enough")
        return {"squared": x * x}

    swept = api.sweep(square, api.grid(x=[1, 2, 3]), site="tu-hpc", time="5m")
    swept.submit()
    assert dict(swept.wait(timeout_s=240)) == {"COMPLETED": 2, "FAILED": 1}
    first, second, third = swept.table().rows
    assert (first["squared"], third["squared"]) == (1, 9)
    assert second["error"] == "ValueError: two is odd enough"
    assert "in square" in second["traceback"]
    assert swept.path.stat().st_mode & 0o777 == 0o700


def test_submitits_own_examples_run_unchanged(folder: Path) -> None:
    """One job, an array, a batch, a coroutine, and an exception with its trace."""

    def add(a: Any, b: Any) -> Any:
        return a + b

    executor = api.executor(site="tu-hpc", time="5m", folder="submitit")
    single = executor.submit(add, 5, 7)
    array = executor.map_array(add, [1, 2, 3], [10, 20, 30])
    with executor.batch():
        batch = [executor.submit(add, k, k) for k in range(3)]
    failing = executor.submit(add, "text", 1)
    assert single.result() == 12
    assert [job.result() for job in array] == [11, 22, 33]
    assert [job.result() for job in batch] == [0, 2, 4]
    assert asyncio.run(single.awaitable().result()) == 12
    assert "TypeError" in str(failing.exception())


def test_submitits_checkpoint_is_requeued_and_goes_on(folder: Path) -> None:
    """It counts, is told that its end is near, and goes on where it was."""

    class Counting:
        def __init__(self, at: int = 0) -> None:
            self.at = at

        def __call__(self, started: str, until: int) -> tuple[int, str]:
            begun = self.at
            while self.at < until:
                self.at += 1
                Path(started).touch()
                time.sleep(3600 if begun == 0 else 0)
            return begun, os.environ["SLURM_RESTART_COUNT"]

        def checkpoint(self, started: str, until: int) -> submitit.helpers.DelayedSubmission:
            return submitit.helpers.DelayedSubmission(Counting(self.at), started, until)

    executor = api.executor(site="tu-hpc", time="5m", folder="submitit")
    job = executor.submit(Counting(), str(folder / "started"), 3)
    eventually((folder / "started").exists)
    slurm("scancel", "--signal=USR2", job.job_id)
    assert job.result() == (1, "1")
