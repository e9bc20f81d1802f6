"""`hpcjobs monitor` on a real local job of any program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import hpcjobs, ok, start
from scripted_slurm import answer
from waiting import eventually


def start_job(here: Path) -> Path:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\ntouch started\nuntil [ -e go ]; do sleep 0.2; done\n")
    program.chmod(0o755)
    run_dir = Path(ok("submit", "--site", "local", "--name", "any", "--json", str(program)).json["run_dir"])
    eventually(lambda: (here / "started").exists())
    return run_dir


def test_a_running_job_of_any_program_is_sampled_until_it_ends_and_shown(here: Path) -> None:
    run_dir = start_job(here)
    watcher = start("monitor", "any", "--interval", "1")
    assert watcher.stdout is not None
    assert "CPU" in watcher.stdout.readline()
    assert ": CPU" in ok("show", "any").out
    second = start("monitor", "any")
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


def test_who_watches_takes_the_samples_once_the_one_who_took_them_is_gone(here: Path) -> None:
    start_job(here)
    first = start("monitor", "any", "--interval", "1")
    assert first.stdout is not None
    assert "CPU" in first.stdout.readline()
    second = start("monitor", "any", "--interval", "1", "--cancel-idle", "15s")
    assert second.stderr is not None
    assert "is sampled already: watching" in second.stderr.readline()
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    out, err = second.communicate(timeout=200)
    assert "nobody sampled job L1 any more: its sampling begins again" in err
    assert "cancelled L1: all its nodes idle for" in out


def test_a_job_submitted_with_monitor_is_sampled_from_its_start_whatever_its_program_is(here: Path) -> None:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\nuntil [ -e go ]; do sleep 0.2; done\n")
    program.chmod(0o755)
    arguments = ("--site", "local", "--monitor", "--name", "sampled", "--json", "./program.sh")
    run_dir = Path(ok("submit", *arguments).json["run_dir"])
    path = run_dir / "monitor.jsonl"
    eventually(lambda: path.exists() and '"sample"' in path.read_text())
    second = start("monitor", "sampled")
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


def test_a_job_that_was_submitted_by_other_means_is_sampled_by_its_id(here: Path, slurm: Path) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    program = subprocess.Popen(["sleep", "600"], env={**os.environ, "SLURM_JOB_ID": "4711", "RANK": "0"})
    try:
        watcher = start("monitor", "4711", "--interval", "1")
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
    assert step.startswith("--jobid=4711 --overlap --mpi=none --nodelist=n7 --nodes=1 --ntasks=1 --ntasks-per-node=1 ")
    assert program.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("shown", "code", "text"),
    [
        (f"echo '{SHOWN.format(state='COMPLETED', nodes='n7')}'", 5, "job 4711 is COMPLETED: it has no processes"),
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


def test_a_job_that_is_idle_for_too_long_is_cancelled_if_asked(here: Path) -> None:
    start_job(here)
    answer = ok("monitor", "any", "--interval", "1", "--cancel-idle", "3s")
    assert "cancelled L1: all its nodes idle for" in answer.out
    eventually(lambda: ok("ps", "--json").json[0]["record"]["state"] == "CANCELLED")


def test_a_time_that_is_none_is_refused() -> None:
    answer = hpcjobs("monitor", "any", "--cancel-idle", "soon")
    assert answer.code == 5
    assert "--cancel-idle soon" in answer.err


def test_a_job_is_not_cancelled_while_a_node_of_it_has_no_samples(here: Path, slurm: Path) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n[7-8]')}'")
    answer(slurm, "scancel", ":")
    watcher = start("monitor", "4711", "--interval", "1", "--cancel-idle", "2s")
    assert watcher.stdout is not None
    assert all("CPU" in watcher.stdout.readline() for _ in range(5))
    watcher.send_signal(signal.SIGINT)
    watcher.communicate(timeout=200)
    assert not (slurm / "scancel.asked").exists()


def test_a_job_whose_gpus_cannot_be_read_is_not_cancelled_and_says_so(here: Path, slurm: Path) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    answer(slurm, "scancel", ":")
    env = {"CUDA_VISIBLE_DEVICES": "GPU-none-of-this-machine"}
    watcher = start("monitor", "4711", "--interval", "1", "--cancel-idle", "2s", env=env)
    assert watcher.stdout is not None
    assert all("CPU" in watcher.stdout.readline() for _ in range(5))
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=200)
    assert "--cancel-idle has no effect: how long" in err
    assert not (slurm / "scancel.asked").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_sampler_ends_with_the_command_that_started_it(here: Path, slurm: Path, number: signal.Signals) -> None:
    answer(slurm, "scontrol", f"echo '{SHOWN.format(state='RUNNING', nodes='n7')}'")
    watcher = start("monitor", "4711", "--interval", "1")
    assert watcher.stdout is not None
    assert "CPU" in watcher.stdout.readline()
    watcher.send_signal(number)
    watcher.communicate(timeout=60)
    path = here / "runs" / "monitor-4711" / "monitor.jsonl"
    eventually(lambda: path.read_text().endswith('{"kind": "end"}\n'))
    assert watcher.returncode == 128 + number
