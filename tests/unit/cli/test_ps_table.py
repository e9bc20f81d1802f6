"""The table of `hpcjobs ps`: folded arrays, narrow terminals, colours on terminals only."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest
from commandline import ok, start, within

from hpcjobs.cli.ps_table import make_lines, print_lines
from hpcjobs.run.listing import Row
from hpcjobs.scheduler.base import JobRecord, State


def rows() -> list[Row]:
    def row(job_id: str, state: State, name: str, *, code: int | None = None, reason: str | None = None) -> Row:
        record = JobRecord(
            job_id, state, source="squeue", node_list="n[1-2]", elapsed_s=90.0, exit_code=code, reason=reason
        )
        return Row(record, name, "mine", f"/runs/{name}")

    return [
        row("42_0", State.COMPLETED, "sweep", code=0),
        row("42_1", State.FAILED, "sweep", code=3),
        row("42_[2-4]", State.PENDING, "sweep", reason="QOSMaxJobsPerUserLimit"),
        row("43", State.RUNNING, "a-long-name-of-a-job"),
    ]


def test_an_array_is_one_line_with_the_number_of_tasks_in_each_state() -> None:
    array, single = make_lines(rows(), tasks=False)
    assert array.cells[0] == "42"
    assert array.cells[3:5] == ("1 COMPLETED, 1 FAILED, 3 PENDING", "5 tasks")
    assert array.cells[7:9] == ("3", "QOSMaxJobsPerUserLimit")
    assert array.state is State.FAILED
    assert single.cells[:4] == ("43", "a-long-name-of-a-job", "mine", "RUNNING")
    assert [line.cells[0] for line in make_lines(rows(), tasks=True)] == ["42_0", "42_1", "42_[2-4]", "43"]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_width_shows_each_job_in_one_line_with_its_state(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_lines(make_lines(rows(), tasks=True), folders=False)
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= width
    for job, state in (("42_[2-4]", "PENDING"), ("42_1", "FAILED"), ("43", "RUNNING")):
        assert any(line.startswith(job) and state in line for line in lines)
    assert "\x1b" not in out


def seen_on_terminal(**env: str) -> str:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    words = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    words |= {"TERM": "xterm-256color", **env}
    with subprocess.Popen([sys.executable, "-m", "hpcjobs", "ps"], stdout=slave, stdin=slave, env=words):
        os.close(slave)
        seen = b""
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # the other side is closed
                break
            seen += data
            if not data:
                break
    os.close(master)
    return seen.decode()


def test_states_have_colours_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    ok("submit", "--site", "local", "--wait", "true")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32mCOMPLETED" in seen_on_terminal()
    plain = seen_on_terminal(NO_COLOR="1")
    assert "COMPLETED" in plain
    assert "\x1b[3" not in plain
    assert "\x1b" not in ok("ps").out + ok("ps", "--json").out


def test_watching_prints_the_table_until_it_is_interrupted() -> None:
    ok("submit", "--site", "local", "--wait", "true")
    watching = start("ps", "--watch", start_new_session=True)
    assert watching.stdout is not None
    watching.stdout.readline()
    assert watching.stdout.readline().startswith("JOB ")
    watching.stdout.readline()
    assert "COMPLETED" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    err = watching.communicate(timeout=240)[1]
    assert (watching.returncode, "Traceback" in err) == (130, False)


def test_watching_is_not_for_programs() -> None:
    answered = within("ps", "--watch", "--json")
    assert (answered.code, answered.out) == (5, "")
    assert "--watch is for people" in answered.err
