"""What a task does with a signal, told to its shell alone or to its whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hpcjobs.data import data_folder

MANY = 20
"""Of shells that were told at once, two in five forgot a child that ended in that very moment, and waited for ever."""
SENDERS: dict[str, Callable[[int, int], None]] = {"the group": os.killpg, "the shell alone": os.kill}
DIES = "echo up; exec sleep 60"
SAVES = "trap 'sleep 0.2; kill $!; exit 5' TERM; echo up; sleep 60 & wait; wait"


@contextmanager
def task(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A task of a cluster's job that runs ``program``."""
    job = {"HPCJOBS_RUN_DIR": str(folder), "HPCJOBS_NTASKS": "4", "HPCJOBS_SCHEDULER": "slurm"}
    rank = {"RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    begun = subprocess.Popen(
        ["bash", data_folder("templates") / "shell" / "rank.sh", "--label", "--", "bash", "-c", program],
        env=os.environ | rank | job | {"HPCJOBS_LAUNCHED_BY": "torchrun"},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with begun:
        try:
            yield begun
        finally:
            if begun.poll() is None:
                os.killpg(begun.pid, signal.SIGKILL)


@pytest.mark.parametrize(("program", "code"), [(DIES, 143), (SAVES, 5)], ids=["one that dies", "one that saves first"])
@pytest.mark.parametrize("whom", SENDERS)
def test_tasks_that_are_told_to_end_do_so_at_once_with_the_programs_code(
    whom: str, program: str, code: int, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        tasks = [stack.enter_context(task(program, tmp_path)) for _ in range(MANY)]
        for begun in tasks:
            assert begun.stdout is not None
            assert begun.stdout.readline() == "3: up\n"
        for begun in tasks:
            SENDERS[whom](begun.pid, signal.SIGTERM)
        assert [begun.wait(timeout=20) for begun in tasks] == [code] * MANY
