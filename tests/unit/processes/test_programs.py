"""How programs are started: interrupted in the terminal, missing, with bytes that are not text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_slurm import answer

from hpcjobs.errors import CommandMissingError
from hpcjobs.processes import programs, start
from hpcjobs.processes.programs import run_following

IN_TERMINAL = "import sys; from hpcjobs.processes.programs import run_in_terminal; run_in_terminal(sys.argv[1:])"


def test_a_program_that_ctrl_c_interrupts_ends_in_its_own_way(tmp_path: Path) -> None:
    """As Terraform does, which releases its lock first."""
    script = f"trap 'sleep 1; touch {tmp_path}/released; exit 1' INT; echo ready; while true; do sleep 0.1; done"
    command = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, "bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"ready\n"
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(240) == -signal.SIGINT
    assert (tmp_path / "released").exists()


def test_a_program_that_is_missing_is_named_and_a_missing_folder_is_not_blamed_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    monkeypatch.setenv("PATH", f"{tmp_path}/closed", prepend=":")
    with pytest.raises(CommandMissingError, match="no-such-program: not found on PATH"):
        programs.run(["no-such-program"])
    monkeypatch.setenv("PATH", str(tmp_path / "closed"))
    with pytest.raises(CommandMissingError, match="ssh: not found on PATH") as refused:
        programs.run(["ssh", "login", "true"])
    assert "on the login host of the site" in (refused.value.hint or "")
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        programs.run(["true"], cwd=str(tmp_path / "nowhere"))


def test_what_a_program_prints_is_text_whatever_its_bytes() -> None:
    assert start.run(["printf", r"a\377\r\nb\r"]).out == "a\udcff\nb\n"
    assert start.run(["printf", r"\377"], errors="replace").out == "\ufffd"


def test_a_program_that_does_not_end_in_time_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        start.run(["sleep", "600"], timeout_s=0.1)


def test_a_progress_bar_is_followed_line_by_line() -> None:
    lines: list[str] = []
    assert run_following(["printf", r"10%%\r100%%\r\ndone\n"], lines.append) == 0
    assert lines == ["10%", "100%", "done"]


def test_a_command_of_slurms_that_has_not_answered_is_named_and_ctrl_c_ends_the_wait(tmp_path: Path) -> None:
    answer(tmp_path, "squeue", "exec sleep 1000")
    Path("mine.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 4}}}\n", encoding="utf-8")
    script = "from hpcjobs.processes import programs; programs._SILENCE_S = 0.2; from hpcjobs.cli import main; main()"
    command = subprocess.Popen(
        [sys.executable, "-c", script, "ps", "--site", "./mine.yaml"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    assert command.stderr.readline() == "hpcjobs: squeue has not answered for 0 s: wait, or press Ctrl-C\n"
    command.send_signal(signal.SIGINT)
    assert (command.communicate()[1], command.returncode) == ("", 130)
