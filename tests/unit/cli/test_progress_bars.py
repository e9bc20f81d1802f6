"""Bars with the time left on a terminal, lines now and then on a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ok, within
from terminal import on_terminal, screen
from test_progress import append
from waiting import eventually

from hpcjobs.cli.progress import ProgressBars
from hpcjobs.record.metrics import SCHEMA as METRICS_SCHEMA


class Clock:
    """Time as a test tells it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_bar_has_the_time_left_and_the_cursor_comes_back() -> None:
    clock = Clock()
    with screen(80) as seen, ProgressBars(clock=clock) as bars:
        bars.show("sweep lr", 0, 100, text="0 of 100 cells have ended")
        clock.now = 60.0
        bars.show("sweep lr", 25, 100, text="25 of 100 cells have ended")
        bars.show("job 7", 10, None, text="step 10")
    last = without_escapes(seen.text).splitlines()[-2:]
    assert re.fullmatch(r"sweep lr [━╸╺]+ 25 of 100 cells have ended +3m00s left\s*", last[0]), last
    assert "job 7" in last[1]
    assert "step 10" in last[1]
    assert seen.text.rfind("\x1b[?25h") > seen.text.rfind("\x1b[?25l")


def test_a_narrow_terminal_keeps_the_time_left() -> None:
    with screen(60) as seen, ProgressBars(clock=Clock()) as bars:
        bars.show("job 123456", 1, 10, text="step 1/10, epoch 0, loss 2.5, 13,892 tokens/s", remaining_s=90)
    lines = without_escapes(seen.text).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-1].rstrip().endswith("1m30s left")


def test_a_pipe_has_a_line_for_a_tenth_or_a_minute_and_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with ProgressBars(clock=clock) as bars:
        for done in range(1001):
            clock.now = float(done)
            bars.show("work", done, 1000, text=f"{done} of 1000")
        bars.show("work", 1000, 1000, text="1000 of 1000")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["hpcjobs: work: 0 of 1000", "hpcjobs: work: 60 of 1000, 15m40s left"]
    assert lines[-1] == "hpcjobs: work: 1000 of 1000"
    assert 15 < len(lines) < 30
    assert "\x1b" not in "".join(lines)


def test_waiting_for_a_job_shows_its_steps_and_the_time_left(here: Path) -> None:
    program = here / "program.sh"
    program.write_text("#!/bin/bash\ntouch started\nuntil [ -e go ]; do sleep 0.1; done\n")
    program.chmod(0o755)
    job = ok("submit", "--site", "local", "--json", str(program)).json
    eventually(lambda: (here / "started").exists())
    metrics = Path(job["run_dir"]) / "metrics.jsonl"
    append(metrics.parent / metrics.name, "run", schema=METRICS_SCHEMA, workload="lm", world_size=1, total_steps=1000)
    for step in (10, 20):
        append(metrics, "step", step=step, epoch=0, loss=2.5, time_s=float(step))
    seen = without_escapes(on_terminal("wait", job["job_id"], "--timeout", "5", columns=100).out)
    assert re.search(rf"job {job['job_id']} [━╸╺]+ step 20/1000, epoch 0, loss 2.5 +16m\d\ds left", seen), seen
    piped = within("wait", job["job_id"], "--timeout", "2", "--json")
    assert [record["state"] for record in json.loads(piped.out)] == ["RUNNING"]
    assert "━" not in piped.err
    (here / "go").touch()
    assert ok("wait", job["job_id"]).code == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_that_ends_the_command_leaves_the_cursor_visible(number: signal.Signals) -> None:
    program = (
        "import time; from hpcjobs.cli.progress import ProgressBars\n"
        "with ProgressBars() as bars:\n"
        "    bars.show('job 7', 1, 10, text='step 1')\n"
        "    while True: time.sleep(0.1)\n"
    )
    limit = (resource.RLIMIT_CORE, (0, 0))  # SIGQUIT leaves no file
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color"},
        preexec_fn=lambda: resource.setrlimit(*limit),
    ) as drawing:
        os.close(slave)
        printed = _read_until(master, b"step 1")
        drawing.send_signal(number)
        printed += _read_until(master, None)
    os.close(master)
    assert drawing.returncode == -number
    assert printed.rfind(b"\x1b[?25h") > printed.rfind(b"\x1b[?25l") >= 0


def _read_until(terminal: int, text: bytes | None) -> bytes:
    """What is printed until ``text`` stands in it; None: until the program has ended."""
    printed = b""
    while text is None or text not in printed:
        try:
            block = os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            block = b""
        if not block:
            break
        printed += block
    return printed


def test_a_sweep_on_a_pipe_is_waited_for_without_rich(here: Path) -> None:
    arguments = ("sweep", "--site", "local", "--set", "lr=1,2", "--name", "lr", "--wait", "true")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hpcjobs", *arguments], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "hpcjobs: sweep lr: 2 of 2 cells have ended: 2 COMPLETED\n" in done.stderr
    assert not re.search(r"\| +rich\b", done.stderr)
    seen = without_escapes(on_terminal("sweep", "resume", "lr", "--wait", columns=100).out)
    assert "2 of 2 cells have ended: 2 COMPLETED" in seen


def test_ctrl_c_while_waiting_for_a_sweep_says_that_it_goes_on_and_how_to_cancel_it(here: Path) -> None:
    (here / "cell.sh").write_text("#!/bin/bash\ntouch started\nuntil [ -e go ]; do sleep 0.1; done\n")
    (here / "cell.sh").chmod(0o755)
    command = ["sweep", "run", "--site", "local", "--wait", "--name", "lr", "--set", "lr=1,2", "./cell.sh"]
    with subprocess.Popen(
        [sys.executable, "-m", "hpcjobs", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stderr is not None
        line = waiting.stderr.readline()
        while "cells have ended" not in line:
            assert line, "it ended before it waited"
            line = waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        printed = waiting.stderr.read()
    (here / "go").touch()
    assert waiting.returncode == 130
    assert "stopped waiting; sweep lr continues" in printed
    assert "`hpcjobs sweep cancel lr` cancels" in printed
