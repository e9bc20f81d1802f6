"""TensorBoard's event files: RUN_FOLDER/tensorboard, for `tensorboard --logdir`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from hpcjobs.trackers import MetricPoint, TrackedRun


class TensorBoardTracker:
    """Event files in the folder ``tensorboard`` of the run."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.folder / "tensorboard"
        self.place = str(folder)
        self._writer = EventFileWriter(str(folder))
        if run.first_step:  # TensorBoard then drops an earlier start's values of these steps
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run.first_step + 1, session_log=start))
        elif run.config:
            shown = json.dumps(run.config, indent=1, ensure_ascii=False, default=str)
            self._writer.add_event(Event(step=0, summary=text_pb("config", f"```\n{shown}\n```")))

    def write(self, points: Sequence[MetricPoint]) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(step=point.step, wall_time=point.time_s, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, *, complete: bool) -> None:
        self._writer.close()
