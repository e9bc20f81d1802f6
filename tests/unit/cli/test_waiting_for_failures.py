"""What waiting prints when a job fails, and when the user stops waiting."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import ok, within
from msgspec.structs import replace
from waiting import eventually

from hpcjobs.cli import follow
from hpcjobs.run.index import Entry
from hpcjobs.run.select import newest
from hpcjobs.run.status import Known, statuses
from hpcjobs.scheduler.base import JobRecord, State


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


@pytest.mark.parametrize("seen", [[State.RUNNING], [State.RUNNING, State.FAILED], [State.FAILED], []])
def test_a_failure_has_the_same_lines_whichever_states_were_seen_before(
    monkeypatch: pytest.MonkeyPatch, seen: list[State]
) -> None:
    assert within("submit", "--site", "local", "--launcher", "spawn", "--wait", "sh", "-c", "exit 7").code == 7
    ((entry, (end,)),) = statuses([newest()])

    def wait_for_ends(entries: list[Entry], *, progress: Callable[[list[JobRecord]], None], **_: object) -> list[Known]:
        for state in seen:
            progress([replace(end, state=state, exit_code=end.exit_code if state.ended else None)])
        return [Known(entry, [end])]

    monkeypatch.setattr(follow, "wait_for_ends", wait_for_ends)
    lines, host = within("wait", "L1").err.splitlines(), os.uname().nodename
    first = lines.index(f"hpcjobs: job L1 FAILED on {host}, exit code 7")
    assert lines[first + 1] == f"hpcjobs: job L1 first failure: rank 0 on {host}"


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
