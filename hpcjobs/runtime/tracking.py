"""Lines of metrics.jsonl, copied to trackers by a thread: neither a slow server nor a broken one holds up a step."""

from __future__ import annotations

import importlib.util
import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hpcjobs.record.numbers import restore
from hpcjobs.runtime.exits import UsageError, print_error

if TYPE_CHECKING:
    from hpcjobs.trackers import TrackedRun, Tracker

TRACKERS = ("tensorboard", "wandb", "mlflow")
LAST_LINES_S = 60.0
"""A run that ends waits this long for its last lines to be copied."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise `UsageError` where a name is not of a tracker, or its package is missing."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"log_to: {name!r} is no tracker", hint=f"there are {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"metrics for {name} need its package", hint=f"pip install 'hpcjobs[{name}]'")


def open_trackers(names: Sequence[str], run: TrackedRun, *, report: Callable[[str], None]) -> Trackers | None:
    """The trackers of these names; `report` gets a line about where each writes. None without names."""
    return Trackers(names, run, report) if names else None


class Trackers:
    """Trackers are opened by the thread too: their packages take seconds to load.

    One that fails is left out from then on, with a warning.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, report: Callable[[str], None]) -> None:
        self._run, self._report = run, report
        self._began_at = time.time()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complete = False
        self._thread = threading.Thread(target=self._copy_all, args=(tuple(names),), name="trackers", daemon=True)
        self._thread.start()

    def copy(self, lines: str) -> None:
        """Lines that were written to metrics.jsonl."""
        self._lines.put(lines)

    def close(self) -> None:
        """Wait until the last lines are copied, for a limited time."""
        self._lines.put(None)
        self._thread.join(LAST_LINES_S)
        if self._thread.is_alive():
            print_error(f"warning: trackers did not take the last lines of metrics in {LAST_LINES_S:.0f} s")

    def _copy_all(self, names: Sequence[str]) -> None:
        from hpcjobs.trackers import read_point

        trackers: dict[str, Tracker] = {}
        for name in names:
            self._attempt(name, trackers, partial(self._open, name, trackers))
        ended = False
        while not ended:
            texts = [self._lines.get()]
            while not self._lines.empty():
                texts.append(self._lines.get())
            ended = None in texts
            lines = [restore(json.loads(line)) for text in texts if text for line in text.rstrip("\n").split("\n")]
            self._complete |= any(line["kind"] == "end" for line in lines)
            read = (read_point(line, began_at=self._began_at) for line in lines)
            points = [point for point in read if point is not None]
            for name, tracker in list(trackers.items()) if points else ():
                self._attempt(name, trackers, partial(tracker.write, points))
        for name, tracker in list(trackers.items()):
            self._attempt(name, trackers, partial(tracker.close, complete=self._complete))

    def _open(self, name: str, trackers: dict[str, Tracker]) -> None:
        tracker: Tracker
        if name == "tensorboard":
            from hpcjobs.trackers.tensorboard import TensorBoardTracker

            tracker = TensorBoardTracker(self._run)
        elif name == "wandb":
            from hpcjobs.trackers.wandb import WandbTracker

            tracker = WandbTracker(self._run)
        else:
            from hpcjobs.trackers.mlflow import MlflowTracker

            tracker = MlflowTracker(self._run)
        trackers[name] = tracker
        self._report(f"metrics also go to {name}: {tracker.place}")

    def _attempt(self, name: str, trackers: dict[str, Tracker], action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever its package or its server raises: the run goes on, and its file has all
            trackers.pop(name, None)
            print_error(f"warning: no more metrics go to {name}: {type(error).__name__}: {error}")
