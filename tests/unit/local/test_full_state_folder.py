"""This machine's queue on a disk that has no room when a job ends."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok, within
from waiting import eventually

LOCAL = ("--site", "local", "--launcher", "spawn")


@pytest.fixture
def state(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The state folder, of 400 KB."""
    path = here / "state"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "small", str(path)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    monkeypatch.setenv("XDG_STATE_HOME", str(path))
    try:
        yield path
    finally:
        (path / "ballast").unlink(missing_ok=True)
        ok("cancel", "--all")
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def submit(here: Path) -> Path:
    """A job that ends with 4 once a file ``go`` is there; its log."""
    run_dir = ok("submit", *LOCAL, "--json", "sh", "-c", f"until [ -e {here}/go ]; do sleep 0.1; done; exit 4").json
    log = Path(run_dir["run_dir"]) / "logs" / "sh_L1.out"
    eventually(log.exists)
    return log


def fill(state: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={state}/ballast", "bs=4K"], capture_output=True, check=False)


def states() -> list[str]:
    return [row["record"]["state"] for row in ok("ps", "-a", "--json").json]


def test_the_end_of_a_job_is_recorded_as_it_was_once_there_is_room(here: Path, state: Path) -> None:
    log = submit(here)
    eventually(lambda: states() == ["RUNNING"])
    fill(state)
    (here / "go").touch()
    script = log.parent.parent / "job.sh"
    eventually(lambda: subprocess.run(["pgrep", "-f", str(script)], capture_output=True).returncode == 1)
    for _ in range(3):  # the supervisor has the end now, and cannot write it
        assert states() == ["RUNNING"], "every verb that lists jobs works without room"
    (state / "ballast").unlink()
    waited = within("wait", "L1")
    assert (waited.code, "exit code 4" in waited.err) == (4, True), waited


def test_a_job_whose_supervisor_was_killed_is_listed_as_failed_without_room_for_its_record(
    here: Path, state: Path
) -> None:
    submit(here)
    eventually(lambda: states() == ["RUNNING"])
    supervisors = subprocess.run(["pgrep", "-f", f"supervisor {state}/"], capture_output=True, text=True, check=True)
    fill(state)
    for pid in supervisors.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    eventually(lambda: states() == ["FAILED"])
    waited = within("wait", "L1")
    assert "supervisor was killed" in waited.err + ok("ps", "-a").out, waited
