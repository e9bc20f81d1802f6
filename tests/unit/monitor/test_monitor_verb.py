"""`hpcjobs monitor` on a real local job of any program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from commandline import hpcjobs, ok, start, within
from scripted_slurm import answer
from slurm_rows import queued_row
from waiting import eventually

from hpcjobs.files import write_beside
from hpcjobs.run import index, steps, wait
from hpcjobs.run.index import Entry

Watch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Starts `hpcjobs monitor` with these arguments; it ends with the test, whatever came of that."""
    watchers: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        watchers.append(start("monitor", *arguments, env=env))
        return watchers[-1]

    yield begin
    for watcher in watchers:
        with watcher:
            watcher.terminate()


@pytest.fixture(autouse=True)
def no_job_is_left(here: Path) -> Iterator[None]:
    """Jobs of `start_job` end with the test."""
    yield
    (here / "go").touch()


def start_job(here: Path, *options: str, site: str = "local") -> Path:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\ntouch started\nuntil [ -e go ]; do sleep 0.2; done\n")
    program.chmod(0o755)
    run_dir = Path(ok("submit", "--site", site, "--name", "any", "--json", *options, str(program)).json["run_dir"])
    eventually(lambda: (here / "started").exists())
    return run_dir


def test_a_running_job_of_any_program_is_sampled_until_it_ends_and_shown(here: Path, watch: Watch) -> None:
    run_dir = start_job(here)
    watcher = watch("any", "--interval", "1")
    assert watcher.stdout is not None
    assert "CPU" in watcher.stdout.readline()
    assert ": CPU" in ok("show", "any").out
    second = watch("any")
    assert second.stderr is not None
    assert "is sampled already: watching" in second.stderr.readline()
    (here / "go").touch()
    for process in (watcher, second):
        _, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
    assert len((run_dir / "monitor.jsonl").read_text().splitlines()) > 1
    ended = hpcjobs("monitor", "any")
    assert ended.code == 5
    assert "job L1 is COMPLETED: it has no processes to sample" in ended.err


def test_who_watches_takes_the_samples_once_the_one_who_took_them_is_gone(here: Path, watch: Watch) -> None:
    start_job(here)
    first = watch("any", "--interval", "1")
    assert first.stdout is not None
    assert "CPU" in first.stdout.readline()
    second = watch("any", "--interval", "1", "--cancel-idle", "15s")
    assert second.stderr is not None
    assert "is sampled already: watching" in second.stderr.readline()
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    out, err = second.communicate(timeout=200)
    assert "nobody sampled job L1 any more: its sampling begins again" in err
    assert "cancelled L1: all its nodes idle for" in out


def test_a_job_submitted_with_monitor_is_sampled_from_its_start_whatever_its_program_is(
    here: Path, watch: Watch
) -> None:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\nuntil [ -e go ]; do sleep 0.2; done\n")
    program.chmod(0o755)
    arguments = ("--site", "local", "--monitor", "--name", "sampled", "--json", "./program.sh")
    run_dir = Path(ok("submit", *arguments).json["run_dir"])
    path = run_dir / "monitor.jsonl"
    eventually(lambda: path.exists() and '"sample"' in path.read_text())
    second = watch("sampled")
    assert second.stderr is not None
    assert "is sampled already: watching" in second.stderr.readline()
    (here / "go").touch()
    assert ok("wait", "sampled").code == 0
    second.communicate(timeout=200)
    eventually(lambda: path.read_text().endswith('{"kind": "end"}\n'))
    assert (run_dir / "monitor.log").read_text() == ""


SHOWN = "JobId=4711 JobName=theirs UserId=me(1) JobState={state} NodeList={nodes} NumNodes=1 Command=/home/me/job.sh"


@pytest.fixture
def slurm(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster whose steps run on this machine; the folder of its commands."""
    commands, conf, sites = tmp_path / "slurm", tmp_path / "slurm.conf", Path.home() / ".config/hpcjobs/site_configs"
    commands.mkdir()
    conf.touch()
    sites.mkdir(parents=True)
    node = "partitions: {batch: {nodes: 2, node: {cpus: 4}}}"
    (sites / "mine.yaml").write_text(f"{{{node}, slurm_conf: {conf}, node_python: {sys.executable}}}\n")
    monkeypatch.setenv("HPCJOBS_SITE", "mine")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    answer(commands, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done\nSLURM_NODEID=0 exec "$@"')
    return commands


def test_a_job_that_was_submitted_by_other_means_is_sampled_by_its_id(here: Path, slurm: Path, watch: Watch) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    program = subprocess.Popen(["sleep", "600"], env={**os.environ, "SLURM_JOB_ID": "4711", "RANK": "0"})
    try:
        watcher = watch("4711", "--interval", "1")
        assert watcher.stdout is not None
        assert "CPU" in watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        _, err = watcher.communicate(timeout=200)
    finally:
        program.kill()
        program.wait()
    folder = here / "runs" / "monitor-4711"
    assert f"its samples go to {folder}" in err
    last = (folder / "monitor.jsonl").read_text().splitlines()[-2]
    assert json.loads(last)["ranks"] == 1
    step = (slurm / "srun.asked").read_text()
    assert "--jobid=4711 --overlap --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=n7 " in step
    assert program.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("shown", "code", "text"),
    [
        (f"echo '{SHOWN.format(state='COMPLETED', nodes='n7')}'", 5, "job 4711 is COMPLETED: it has no processes"),
        (
            f"echo '{SHOWN.format(state='RUNNING', nodes='n7')} HetJobId=4711 HetJobOffset=0'",
            *(5, "job 4711 is heterogeneous: its components cannot be sampled"),
        ),
        ("echo 'Invalid job id specified' >&2; exit 1", 6, "Slurm does not know it: scontrol refused"),
    ],
)
def test_a_job_of_other_means_that_does_not_run_is_named(slurm: Path, shown: str, code: int, text: str) -> None:
    answer(slurm, "scontrol", shown)
    answered = hpcjobs("monitor", "4711")
    assert (answered.code, text in answered.err) == (code, True), answered


def test_a_sampler_that_cannot_start_is_an_error_that_quotes_it(slurm: Path) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    answer(slurm, "srun", "echo 'srun: error: Unable to create step' >&2; exit 1")
    answered = hpcjobs("monitor", "4711")
    assert answered.code != 0
    assert "the sampler of job 4711 ended: srun: error: Unable to create step" in answered.err


def test_a_trainer_that_samples_itself_is_not_sampled_twice() -> None:
    answer = hpcjobs("submit", "--site", "local", "--monitor", "--dry-run", "ddp", "--monitor")
    assert answer.code == 5
    assert "ddp --monitor samples already" in answer.err


def test_why_prints_the_alarms_of_a_job_that_runs(here: Path) -> None:
    run_dir = start_job(here)
    head = {"kind": "monitor", "host": "n1", "started_at": time.time(), "interval_s": 5}
    sample = {"kind": "sample", "time_s": 1, "rss_bytes": 15 << 29, "memory_limit_bytes": 8 << 30}
    (run_dir / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, sample)))
    assert ok("why", "any").out == "job L1 RUNNING: it has not failed\nalarm: n1: memory 7.5G of 8G\n"


def test_a_job_that_is_idle_for_too_long_is_cancelled_if_asked(here: Path) -> None:
    start_job(here)
    answer = ok("monitor", "any", "--interval", "1", "--cancel-idle", "3s")
    assert "cancelled L1: all its nodes idle for" in answer.out
    eventually(lambda: ok("ps", "--json").json[0]["record"]["state"] == "CANCELLED")


def test_a_time_that_is_none_is_refused() -> None:
    answer = hpcjobs("monitor", "any", "--cancel-idle", "soon")
    assert answer.code == 5
    assert "--cancel-idle soon" in answer.err


def test_a_job_is_not_cancelled_while_a_node_of_it_has_no_samples(here: Path, slurm: Path, watch: Watch) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n[7-8]')}'")
    answer(slurm, "scancel", ":")
    watcher = watch("4711", "--interval", "1", "--cancel-idle", "2s")
    assert watcher.stdout is not None
    assert all("CPU" in watcher.stdout.readline() for _ in range(5))
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=200)
    assert not (slurm / "scancel.asked").exists()


def test_a_job_whose_gpus_cannot_be_read_is_not_cancelled_and_says_so(here: Path, slurm: Path, watch: Watch) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    answer(slurm, "scancel", ":")
    env = {"CUDA_VISIBLE_DEVICES": "GPU-none-of-this-machine"}
    watcher = watch("4711", "--interval", "1", "--cancel-idle", "2s", env=env)
    assert watcher.stdout is not None
    assert all("CPU" in watcher.stdout.readline() for _ in range(5))
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=200)
    assert "--cancel-idle has no effect: how long" in err
    assert not (slurm / "scancel.asked").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL])
def test_the_sampler_ends_with_the_command_that_started_it(
    here: Path, slurm: Path, number: signal.Signals, watch: Watch
) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    watcher = watch("4711", "--interval", "1")
    assert watcher.stdout is not None
    assert "CPU" in watcher.stdout.readline()
    watcher.send_signal(number)
    watcher.communicate(timeout=60)
    path = here / "runs" / "monitor-4711" / "monitor.jsonl"
    eventually(lambda: path.read_text().endswith('{"kind": "end"}\n'))
    undone = number in (signal.SIGTERM, signal.SIGHUP)
    assert watcher.returncode == (128 + number if undone else -number)


def test_the_sampler_of_a_job_of_this_machine_ends_with_a_command_that_is_killed(here: Path, watch: Watch) -> None:
    run_dir = start_job(here)
    watcher = watch(str(run_dir), "--interval", "1")
    assert watcher.stdout is not None
    assert "CPU" in watcher.stdout.readline()
    watcher.kill()
    watcher.communicate(timeout=60)
    eventually(lambda: (run_dir / "monitor.jsonl").read_text().endswith('{"kind": "end"}\n'))


OTHER_CLOCK = """\
import runpy, sys, time
own = time.time
time.time = lambda: own() + {difference_s}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the sampler on a node whose clock is not right."""


def write_other_clock(path: Path, difference_s: int) -> None:
    """A Python whose clock differs from this machine's; it takes ``-I PROGRAM``."""
    code = path.with_suffix(".py")
    code.write_text(OTHER_CLOCK.format(difference_s=difference_s))
    path.write_text(f'#!/bin/sh\n[ "$1" = -I ] && shift && set -- {code} "$@"\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)


@pytest.mark.parametrize("difference_s", [-60, 60])
def test_an_idle_job_is_cancelled_though_the_clock_of_its_node_differs(
    slurm: Path, tmp_path: Path, watch: Watch, difference_s: int
) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    answer(slurm, "scancel", ":")
    write_other_clock(tmp_path / "python", difference_s)
    answer(slurm, "srun", f'while [ "${{1#--}}" != "$1" ]; do shift; done\nshift\nexec {tmp_path}/python "$@"')
    watcher = watch("4711", "--interval", "1", "--cancel-idle", "2s")
    out, err = watcher.communicate(timeout=60)
    assert "CPU" in out
    assert "cancelled 4711: all its nodes idle for" in out, err
    assert "4711" in (slurm / "scancel.asked").read_text()


@pytest.mark.parametrize("difference_s", [-60, 60])
def test_the_samples_that_a_job_takes_itself_are_watched_though_the_clock_of_its_node_differs(
    tmp_path: Path, watch: Watch, difference_s: int, here: Path
) -> None:
    write_other_clock(tmp_path / "python", difference_s)
    sites = Path.home() / ".config/hpcjobs/site_configs"
    sites.mkdir(parents=True)
    (sites / "other.yaml").write_text(f"{{scheduler: local, node_python: {tmp_path}/python}}\n")
    run_dir = start_job(here, "--monitor", site="other")
    path = run_dir / "monitor.jsonl"
    eventually(lambda: path.exists() and '"sample"' in path.read_text())
    out, err = watch("any", "--cancel-idle", "6s").communicate(timeout=60)
    assert "cancelled L1: all its nodes idle for" in out
    assert "nobody sampled" not in err


class TwoNodes:
    """The samples of a job on n7, which is idle, and n8, which is busy and fails; another sampler takes them."""

    def __init__(self, run_dir: Path, queue: Path) -> None:
        self._run_dir, self._queue, self._stop = run_dir, queue, threading.Event()
        self._thread = threading.Thread(target=self._take_samples)
        self._write_queue("n[7-8]")

    def __enter__(self) -> TwoNodes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _take_samples(self) -> None:
        began = time.time()
        for number in range(300):
            self._write("monitor.jsonl", "n7", began, idle_s=1000)
            if number < 5:
                self._write("monitor-1.jsonl", "n8", began, idle_s=0)
            else:
                self._write_queue("n7" if number < 100 else None)
            if self._stop.wait(0.2):
                return

    def _write(self, name: str, host: str, began: float, *, idle_s: float) -> None:
        path = self._run_dir / name
        head = {"kind": "monitor", "host": host, "started_at": began, "interval_s": 0.2}
        sample = {"kind": "sample", "time_s": time.time() - began, "cpu_percent": 1, "idle_s": idle_s}
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in ([] if path.stat().st_size else [head]) + [sample])

    def _write_queue(self, nodes: str | None) -> None:
        job = {"JobName": "any", "Partition": "batch", "NNodes": 2, "Command": self._run_dir / "job.sh"}
        write_beside(self._queue, queued_row(**job, NodeList=nodes) + "\n" if nodes else "")


def test_a_job_that_goes_on_with_fewer_nodes_is_cancelled_once_these_are_idle(
    here: Path, slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "QUEUE_S", 0.5)
    monkeypatch.setattr(steps, "FRESH_S", 1.0)
    run_dir = here / "runs" / "any-7"
    run_dir.mkdir(parents=True)
    entry = Entry("7", "any", "mine", "slurm", str(run_dir), time.time() - 60, slurm_conf=str(tmp_path / "slurm.conf"))
    (run_dir / "submitted.json").write_bytes(msgspec.json.encode(entry))
    index.add(entry)
    answer(slurm, "squeue", f"cat {slurm}/rows")
    for command in ("scancel", "sacct", "scontrol"):
        answer(slurm, command, ":")
    with TwoNodes(run_dir, slurm / "rows"):
        eventually((run_dir / "monitor-1.jsonl").exists)
        answered = within("monitor", "any", "--interval", "1", "--cancel-idle", "10s")
    assert "cancelled 7: all its nodes idle for 16m40s" in answered.out
