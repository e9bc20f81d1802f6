"""Wait for a sweep: reads the files of its cells, and asks the queue once a minute for the other states."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from hpcjobs.run.wait import OUTAGE_S, POLL_S, QUEUE_S
from hpcjobs.scheduler.base import Outage, Report, discard
from hpcjobs.sweeps.cell_status import CellStatus
from hpcjobs.sweeps.folder import SweepFolder
from hpcjobs.sweeps.results import state_name
from hpcjobs.sweeps.state_cache import read_cell_state


class CellWatch:
    """Watches the cells that have not ended. It reads the files of cells that have started, and no others."""

    def __init__(self, folder: SweepFolder, now: list[CellStatus]) -> None:
        self._folder = folder
        self.counts: Counter[str] = Counter()
        self._waiting: dict[str, CellStatus] = {}
        self.renew(now)

    def renew(self, now: list[CellStatus]) -> None:
        """Replace the states by those from the scheduler."""
        self._waiting = {cell_status.cell.id: cell_status for cell_status in now if cell_status.open}
        self._seen = {cell_status.cell.id: state_name(cell_status) for cell_status in now}
        self.counts = Counter(self._seen.values())

    def look(self) -> bool:
        """Read new states; False once every cell has ended."""
        for cell in self._folder.started_cells() & self._waiting.keys():
            state = read_cell_state(self._folder, cell)
            attempt = self._waiting[cell].job_id
            if state is None or (attempt is not None and state.job_id != attempt and state.state.value != "COMPLETED"):
                continue
            self.counts[self._seen[cell]] -= 1
            self.counts[state.state.value] += 1
            self._seen[cell] = state.state.value
            if state.state.ended:
                del self._waiting[cell]
        return bool(self._waiting)


def wait_for_cells(
    folder: SweepFolder,
    cell_statuses: Callable[[], list[CellStatus]],
    *,
    deadline: float | None = None,
    progress: Callable[[Counter[str]], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
    report: Report = discard,
) -> None:
    """Return when no cell is queued, running or waiting to be submitted.

    Errors of a scheduler that has answered before are passed to ``report`` and survived.

    Raises:
        SchedulerError: the scheduler does not answer the first question.
        TimeoutError: ``deadline`` (of the monotonic clock) has passed.
    """
    outage = Outage(report)
    watch = CellWatch(folder, outage.ask(cell_statuses) or [])
    due, reported = time.monotonic() + QUEUE_S, None
    while True:
        more = watch.look()
        if progress is not None and watch.counts != reported:
            reported = watch.counts.copy()
            progress(reported)
        if time.monotonic() >= due or not (more or outage.lasts):
            now = outage.ask(cell_statuses)
            due = time.monotonic() + (QUEUE_S if now is not None else OUTAGE_S)
            if now is not None:
                watch.renew(now)
                if not watch.look():
                    return
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"not ended in time: {dict(+watch.counts)}")
        pause(POLL_S)
