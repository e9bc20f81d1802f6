"""What waiting prints when a job fails, and when the user stops waiting."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

from commandline import ok, within
from waiting import eventually


def test_the_last_lines_of_the_first_failing_rank_its_signal_and_the_next_command_are_printed(here: Path) -> None:
    program = here / "train.sh"
    program.write_text('#!/bin/bash\n[ "$RANK" = 1 ] && echo bad batch && kill -KILL $$\necho fine; sleep 60\n')
    program.chmod(0o755)
    answer = within(
        "submit", "--site", "local", "--launcher", "spawn", "--ntasks-per-node", "2", "--wait", "./train.sh"
    )
    assert answer.code == 137, answer
    first = f"first failure: rank 1 on {os.uname().nodename}, killed by signal 9 (SIGKILL), often out of memory"
    assert first in answer.err
    assert "hpcjobs: last lines of rank 1:\nhpcjobs:   bad batch\n" in answer.err
    assert "fine" not in answer.err
    assert answer.err.endswith("hpcjobs: next: hpcjobs why L1\n")
    assert "cause: Killed by signal 9" in ok("why", "L1").out


def test_a_failure_after_a_while_has_the_same_lines_as_one_at_once(here: Path) -> None:
    program, host = here / "train.sh", os.uname().nodename
    program.write_text('#!/bin/bash\nuntil [ -e go ]; do sleep 0.1; done\n[ "$RANK" = 1 ] && exit 7; sleep 60\n')
    program.chmod(0o755)
    ok("submit", "--site", "local", "--launcher", "spawn", "--ntasks-per-node", "2", "./train.sh")
    command = [sys.executable, "-m", "hpcjobs", "wait", "L1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == f"hpcjobs: job L1 RUNNING on {host}\n"
        (here / "go").touch()
        lines = waiting.stderr.read().splitlines()
    assert waiting.returncode == 7
    expected = [f"hpcjobs: job L1 FAILED on {host}, exit code 7", f"hpcjobs: job L1 first failure: rank 1 on {host}"]
    assert lines[:2] == expected
    assert expected == [line for line in within("wait", "L1").err.splitlines() if line in expected]


def test_ctrl_c_while_waiting_says_that_the_job_goes_on_and_how_to_cancel_it() -> None:
    terminal, inside = pty.openpty()
    # A session of its own whose terminal this is: Ctrl-C reaches it as it does a shell's command.
    submit = [sys.executable, "-m", "hpcjobs", "submit", "--site", "local", "--wait", "sleep", "600"]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *submit],
        stdin=inside, stdout=inside, stderr=inside,
    )  # fmt: skip
    os.close(inside)
    printed = ""

    def read_until(text: str) -> None:
        nonlocal printed
        while text not in printed:
            printed += os.read(terminal, 4096).decode()

    try:
        read_until("RUNNING")
        os.write(terminal, b"\x03")
        read_until("cancels")
        assert process.wait(240) in (130, 128 + signal.SIGINT)
        assert re.search(r"job L1 continues: `hpcjobs wait L1` waits again, `hpcjobs cancel L1` cancels", printed)
        assert "Traceback" not in printed
        (row,) = ok("ps", "--json").json
        assert row["record"]["state"] == "RUNNING"
    finally:
        os.close(terminal)
        ok("cancel", "L1")
    eventually(lambda: ok("ps", "--json").json[0]["record"]["state"] == "CANCELLED")
