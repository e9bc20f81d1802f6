"""Waiting for a sweep, with a bar of its cells."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hpcjobs.cli.output import note
from hpcjobs.cli.progress import ProgressBars

if TYPE_CHECKING:
    from hpcjobs.sweeps.sweep import Sweep

_NOT_ENDED = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING")


def wait_for_sweep(sweep: Sweep) -> int:
    """Wait with a bar of the cells that have ended; 0 if every cell succeeded."""
    title = f"sweep {sweep.definition.name}"
    with ProgressBars() as bars:

        def show(counts: Counter[str]) -> None:
            total = counts.total()
            ended = total - sum(counts[state] for state in _NOT_ENDED)
            states = ", ".join(f"{count} {state}" for state, count in sorted((+counts).items()))
            bars.show(title, ended, total, text=f"{ended} of {total} cells have ended: {states}")

        try:
            counts = sweep.wait(progress=show, report=note)
        except KeyboardInterrupt:
            name = sweep.definition.name
            note(
                f"stopped waiting; sweep {name} continues: `hpcjobs sweep status {name}` shows it, "
                f"`hpcjobs sweep cancel {name}` cancels"
            )
            raise
    return 0 if set(+counts) <= {"COMPLETED"} else 1
