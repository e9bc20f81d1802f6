"""N copies of a command as one world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .machines import alive, until

RUNNING: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    for process in RUNNING:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=90)
    RUNNING.clear()


def start(ntasks: int, *command: str, grace_s: float = 1) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcjobs.runtime.spawn", f"--ntasks={ntasks}", "--", *command],
        env={**os.environ, "HPCJOBS_GRACE_S": str(grace_s)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    RUNNING.append(process)
    return process


def run(ntasks: int, *command: str) -> tuple[int, str, str]:
    process = start(ntasks, *command)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def pids(here: Path, count: int) -> list[int]:
    """What ``echo $$ > pid.$RANK`` of the tasks says, once all have said it."""
    until(lambda: len([p for p in here.glob("pid.*") if p.read_text()]) == count)
    return [int(path.read_text()) for path in sorted(here.glob("pid.*"))]


def test_each_copy_knows_its_place() -> None:
    arguments = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $NODE_RANK"'
    code, out, err = run(3, "bash", "-c", arguments)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 0 3 3 0", "1 1 3 3 0", "2 2 3 3 0"]


def test_copies_read_nothing() -> None:
    assert run(2, "cat") == (0, "", "")


def test_the_first_failure_ends_the_others_and_is_the_answer(here: Path) -> None:
    fail = "if [ $RANK = 1 ]; then until [ -s pid.0 -a -s pid.2 ]; do sleep 0.01; done; exit 7; fi"
    code, _, _ = run(3, "bash", "-c", f"echo $$ > pid.$RANK; {fail}; exec sleep 60")
    assert code == 7
    assert not any(alive(pid) for pid in pids(here, 3))


def test_a_copy_that_ends_well_ends_nobody_else() -> None:
    code, out, _ = run(2, "bash", "-c", "[ $RANK = 0 ] || { sleep 0.3; echo late; }")
    assert (code, out) == (0, "late\n")


def test_a_copy_that_does_not_heed_the_end_is_killed_after_the_grace(here: Path) -> None:
    fail = "if [ $RANK = 0 ]; then until [ -s pid.1 ]; do sleep 0.01; done; exit 4; fi"
    arguments = f"trap '' TERM; echo $$ > pid.$RANK; {fail}; while :; do sleep 60; done"
    before = time.monotonic()
    code, _, _ = run(2, "bash", "-c", arguments)
    assert code == 4
    assert 1 <= time.monotonic() - before < 50
    assert not any(alive(pid) for pid in pids(here, 2))


def test_a_signal_that_ends_a_copy_counts_as_the_shell_counts() -> None:
    assert run(2, "bash", "-c", "kill -SEGV $$")[0] == 139


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_to_every_copy(here: Path, number: signal.Signals) -> None:
    arguments = f'trap "echo heard; exit" {number.name[3:]}; echo $$ > pid.$RANK; while :; do sleep 0.02; done'
    process = start(2, "bash", "-c", arguments)
    pids(here, 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=90)
    assert (process.returncode, out) == (0, "heard\nheard\n")


def test_copies_are_told_to_end_once_however_often_we_are(here: Path) -> None:
    traps = 'trap "echo heard" TERM; trap "touch over" USR2'
    arguments = f"{traps}; echo $$ > pid.$RANK; until [ -e over ]; do sleep 0.02; done; exit 0"
    process = start(1, "bash", "-c", arguments)
    pids(here, 1)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "heard\n"
    process.terminate()
    process.send_signal(signal.SIGUSR2)
    assert (process.communicate(timeout=90)[0], process.returncode) == ("", 0)


def test_copies_end_at_a_closed_pipe_as_programs_do() -> None:
    code, out, err = run(1, "bash", "-c", 'yes | head -n 1; echo "${PIPESTATUS[0]}"')
    assert (code, out, err) == (0, "y\n141\n", "")


def test_copies_can_be_interrupted_when_a_shell_started_us_in_the_background(here: Path) -> None:
    spawn = f"{sys.executable} -m hpcjobs.runtime.spawn --ntasks 1 --"
    arguments = f"{spawn} bash -c 'echo $$ > pid.0; exec sleep 60' & echo $!; wait $!; echo $?"
    process = subprocess.Popen(["bash", "-c", arguments], stdout=subprocess.PIPE, text=True)
    RUNNING.append(process)
    pids(here, 1)
    assert process.stdout is not None
    os.kill(int(process.stdout.readline()), signal.SIGINT)
    assert process.communicate(timeout=90)[0] == "130\n"


def test_killed_it_takes_the_copies_and_their_children_along(here: Path) -> None:
    arguments = (
        "(trap '' TERM; echo $BASHPID > pid.child$RANK; while :; do sleep 0.1; done) & echo $$ > pid.$RANK; wait"
    )
    process = start(2, "bash", "-c", arguments)
    result = pids(here, 4)
    process.kill()
    until(lambda: not any(alive(pid) for pid in result))


def test_what_copies_leave_in_the_background_ends_with_the_last(here: Path) -> None:
    code, _, _ = run(2, "bash", "-c", "sleep 60 > /dev/null 2>&1 & echo $! > pid.$RANK")
    assert code == 0
    assert not any(alive(pid) for pid in pids(here, 2))


def test_a_command_that_is_not_there_or_no_program_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder of PATH may not be read."""
    (here / "text").write_text("no program")
    (here / "closed").mkdir(mode=0)
    monkeypatch.setenv("PATH", f"{here}/closed", prepend=":")
    assert run(1, "no-such-command")[::2] == (127, "hpcjobs: no-such-command: No such file or directory\n")
    assert run(1, "./text")[::2] == (126, "hpcjobs: ./text: Permission denied\n")


@pytest.mark.parametrize(
    "arguments", [[], ["--ntasks", "2"], ["--ntasks", "0", "--", "true"], ["--tasks=2", "--", "true"]]
)
def test_a_wrong_call_is_explained(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "hpcjobs.runtime.spawn", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
