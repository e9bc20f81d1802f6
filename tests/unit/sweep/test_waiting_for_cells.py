"""Waiting for a sweep while its scheduler comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcjobs.errors import SchedulerError
from hpcjobs.scheduler.base import State
from hpcjobs.sweeps.cell_status import CellStatus
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
