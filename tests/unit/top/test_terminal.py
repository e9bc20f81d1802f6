"""`hpcjobs top` in a real terminal (tmux) on real local jobs: its text at two sizes, and its keys."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok
from tmux import Terminal
from waiting import eventually

from hpcjobs.record.metrics import MetricsLog

GOLDEN = Path(__file__).parents[2] / "data" / "top"


@pytest.fixture(params=[(80, 24), (160, 50)], ids=["80x24", "160x50"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    one = Terminal(tmp_path, *request.param)
    yield one
    one.end()


def normalised(text: str) -> str:
    """The screen with this host's name, times and spans of time replaced by marks, and wide gaps by narrow ones."""
    host = os.uname().nodename

    text = re.sub(r"\d\d:\d\d:\d\d|\b\d\d:\d\d\b", "TIME", text)
    text = re.sub(r"\d+m\d\ds|(?<![\w.])\d+s\b", "SPAN", text)
    text = re.sub(rf"{re.escape(host)}", "HOST", text)
    return "\n".join(re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines()).rstrip() + "\n"


def start_jobs(here: Path) -> Path:
    """A job that trains, as far as its files say, and one that has failed; the folder of the first."""
    program = here / "train.sh"
    program.write_text("#!/bin/bash\necho a line of the log\nuntil [ -e go ]; do sleep 0.2; done\n")
    program.chmod(0o755)
    failing = here / "fail.sh"
    failing.write_text("#!/bin/bash\nexit 3\n")
    failing.chmod(0o755)
    ok("submit", "--site", "local", "--name", "failing", str(failing))
    run_dir = Path(ok("submit", "--site", "local", "--name", "training", "--json", str(program)).json["run_dir"])
    eventually(
        lambda: [job["record"]["state"] for job in ok("ps", "--site", "local", "--json").json] == ["FAILED", "RUNNING"]
    )
    metrics = MetricsLog(run_dir / "metrics.jsonl")
    metrics.write("run", total_steps=400)
    for step in range(10, 101, 10):
        metrics.write("step", step=step, epoch=0, loss=5 - step / 25, throughput=13_892.4, unit="tokens/s", time_s=step)
    metrics.close()
    monitor = MetricsLog(run_dir / "monitor.jsonl")
    monitor.write("monitor", host="n1", interval_s=1.0, started_at=time.time())
    monitor.write("sample", time_s=0, cpu_percent=40.0, rss_bytes=1.5 * 2**30, gpu_percent=91.0, gpu_memory_bytes=2e10)
    monitor.close()
    return run_dir


def test_the_screen_on_local_jobs_has_its_text_and_its_keys_work(
    here: Path, terminal: Terminal, request: pytest.FixtureRequest
) -> None:
    run_dir = start_jobs(here)
    terminal.start(sys.executable, "-m", "hpcjobs", "top", "--site", "local")
    terminal.await_text("training", "25%", "step 100 of 400", "q Quit")
    golden = GOLDEN / f"{request.node.callspec.id}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(normalised(terminal.text), encoding="utf-8")
    assert normalised(terminal.text) == golden.read_text(encoding="utf-8")

    terminal.press("l")
    terminal.await_text("a line of the log")
    terminal.press("Escape")
    terminal.await_text("JOB", "q Quit")
    terminal.press("Down")
    terminal.press("w")
    terminal.await_text("cause:", "exit code 3")
    terminal.press("q")
    terminal.await_text("q Quit")
    terminal.press("Up")
    terminal.press("c")
    terminal.await_text("Cancel job L2 (training)?")
    terminal.press("y")
    terminal.await_text("cancelled L2", "CANCELLED")
    assert (run_dir / "state.json").exists()
    terminal.press("q")
    assert terminal.await_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_screen_leaves_the_terminal_as_it_was(here: Path, number: signal.Signals) -> None:
    primary, secondary = pty.openpty()
    before = termios.tcgetattr(secondary)
    with subprocess.Popen(
        [sys.executable, "-m", "hpcjobs", "top", "--site", "local"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        start_new_session=True,
    ) as screen:
        printed = bytearray()

        def reads(text: bytes) -> bool:
            while select.select([primary], [], [], 0)[0]:
                printed.extend(os.read(primary, 1 << 16))
            return text in printed

        try:
            eventually(lambda: reads(b"Quit"), timeout_s=120)
            assert termios.tcgetattr(secondary) != before
            screen.send_signal(number)
            eventually(lambda: (reads(b"\x1b[?1049l"), screen.poll())[1] is not None, timeout_s=120)
            assert screen.returncode == -number
            assert reads(b"\x1b[?1049l")
            assert termios.tcgetattr(secondary) == before
        finally:
            screen.kill()
            os.close(primary)
            os.close(secondary)
