"""Waiting for a sweep while its scheduler comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok

from hpcjobs.errors import SchedulerError
from hpcjobs.record.state import StateFile
from hpcjobs.run.index import entries
from hpcjobs.run.wait import wait
from hpcjobs.scheduler.base import State
from hpcjobs.sweeps.cell_status import CellStatus, read_states
from hpcjobs.sweeps.cells import Cell
from hpcjobs.sweeps.folder import SweepFolder
from hpcjobs.sweeps.sweep import wait_for_cells


def test_a_sweep_is_waited_for_through_errors_of_a_scheduler_that_has_answered(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "cells").mkdir()
    cell = Cell(id="a", params={})
    answers: Iterator[State | None] = iter([State.RUNNING, None, None, State.RUNNING, State.COMPLETED])
    clock, reports = [0.0], []

    def look() -> list[CellStatus]:
        state = next(answers)
        if state is None:
            raise SchedulerError("squeue refused: Incompatible versions of client and server code")
        return [CellStatus(cell, state)]

    def pause(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("hpcjobs.sweeps.sweep.time.monotonic", lambda: clock[0])
    wait_for_cells(SweepFolder(here), look, pause=pause, report=reports.append)
    assert next(answers, "all asked") == "all asked"
    assert len(reports) == 2
    assert "Incompatible versions" in reports[0]


@pytest.mark.parametrize("code", [0, 3])
def test_a_cell_that_ends_between_two_looks_of_one_status_has_its_end(
    here: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its state was read while it ran, and the queue once it had ended: `resume` would have run it again."""
    program = f"until test -e go; do sleep 0.05; done; exit {code}"
    ok("sweep", "--site", "local", "--name", "s", "--set", "i=1", "sh", "-c", program)

    def read_and_let_it_end(folder: SweepFolder) -> dict[str, StateFile]:
        states = read_states(folder)
        (here / "go").touch()
        wait(entries(), timeout_s=120)
        return states

    monkeypatch.setattr("hpcjobs.sweeps.cell_status.read_states", read_and_let_it_end)
    assert ok("sweep", "status", "s", "--json").json["states"] == {"FAILED" if code else "COMPLETED": 1}
