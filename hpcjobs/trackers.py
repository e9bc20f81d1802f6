"""Copies of a run's metrics for other programs' pages: TensorBoard, Weights & Biases, MLflow; a class for each.

A tracker gets points from metrics.jsonl, each with a step, a time and numbers by name. metrics.jsonl stays complete
if a tracker fails. A tracker's package takes seconds to load: it is imported where the tracker starts.

`wandb sync RUN_FOLDER/wandb/offline-run-*` sends an offline run from a machine with a network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

GROUPS = {"step": "train", "evaluation": "held_out", "checkpoint": "checkpoint"}
"""The kinds of lines that have numbers, and the group of their names."""
REACH_S = 5.0


class MetricPoint(NamedTuple):
    """Numbers of one line of metrics.jsonl, as ``train/loss``; `time_s` in seconds since 1970."""

    step: int
    time_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker copies."""

    folder: Path
    name: str
    first_step: int
    """Finished steps at this start: later ones, of an earlier start, do not count any more."""
    config: Mapping[str, Any] = field(default_factory=dict)

    def read_id(self, program: str) -> str | None:
        """The name under which an earlier start of a resumed run is known to the program."""
        file = self.folder / f".{program}-run"
        return file.read_text(encoding="utf-8").strip() if self.first_step and file.exists() else None

    def write_id(self, program: str, run_id: str) -> None:
        (self.folder / f".{program}-run").write_text(f"{run_id}\n", encoding="utf-8")


class Tracker(Protocol):
    """One program's copy of the metrics."""

    @property
    def place(self) -> str: ...

    def write(self, points: Sequence[MetricPoint]) -> None: ...

    def close(self, *, complete: bool) -> None: ...


def read_point(line: Mapping[str, Any], *, began_at: float) -> MetricPoint | None:
    """The numbers of a line of metrics.jsonl; None for a line of another kind."""
    group = GROUPS.get(line["kind"])
    if group is None:
        return None
    numbers = {**line, **(line.get("metrics") or {})}
    values = {
        key if key == "epoch" else f"{group}/{key}": float(value)
        for key, value in numbers.items()
        if key not in ("step", "time_s") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return MetricPoint(line["step"], began_at + line["time_s"], values)


def is_reachable(url: str) -> bool:
    """Whether a server answers there, through the environment's proxies."""
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(url, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


class TensorBoardTracker:
    """Event files in RUN_FOLDER/tensorboard, for `tensorboard --logdir`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.place = str(run.folder / "tensorboard")
        self._writer = EventFileWriter(self.place)
        if run.first_step:  # TensorBoard then drops an earlier start's values of these steps
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run.first_step + 1, session_log=start))
        elif run.config:
            shown = json.dumps(run.config, indent=1, ensure_ascii=False, default=str)
            self._writer.add_event(Event(step=0, summary=text_pb("config", f"```\n{shown}\n```")))

    def write(self, points: Sequence[MetricPoint]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(step=point.step, wall_time=point.time_s, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, *, complete: bool) -> None:
        self._writer.close()


WANDB_SERVER = "https://api.wandb.ai"


class WandbTracker:
    """A run of Weights & Biases in RUN_FOLDER/wandb; offline on a node without its server, unless WANDB_MODE is set."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_MODE", choose_wandb_mode())
        run_id = run.read_id("wandb") or os.urandom(6).hex()
        self._run = wandb.init(
            dir=str(run.folder),
            id=run_id,
            resume="allow",
            name=os.environ.get("WANDB_NAME", run.name),
            project=os.environ.get("WANDB_PROJECT", re.sub(r"[/\\#?%:]", "-", run.name)),  # it refuses these
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        run.write_id("wandb", run_id)
        self.place = self._run.url or str(run.folder / "wandb")

    def write(self, points: Sequence[MetricPoint]) -> None:
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time_s}, step=point.step)

    def close(self, *, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


def choose_wandb_mode() -> str:
    """The mode if WANDB_MODE is not set: online with a key, as `wandb login` puts it, for a server that answers."""
    import netrc
    from urllib.parse import urlsplit

    server = os.environ.get("WANDB_BASE_URL", WANDB_SERVER)
    key: object = os.environ.get("WANDB_API_KEY")
    if not key:
        try:
            key = netrc.netrc().authenticators(urlsplit(server).hostname or "")
        except (OSError, netrc.NetrcParseError):  # ~/.netrc is missing or invalid
            key = None
    return "online" if key and is_reachable(server) else "offline"


MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 500  # of one request, by MLflow's REST interface


class MlflowTracker:
    """A run of MLflow: at MLFLOW_TRACKING_URI, or in RUN_FOLDER/mlruns if none is set or it does not answer."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported

        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = choose_mlflow_uri(run)
        self._client = MlflowClient(tracking_uri=uri)
        run_id = run.read_id("mlflow")
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.name)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(experiment_id, run_name=run.folder.name).info.run_id
            run.write_id("mlflow", run_id)
            params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.config.items() if value is not None]
            for start in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        self.place = f"{uri}, run {run_id}"

    def write(self, points: Sequence[MetricPoint]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * point.time_s), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MOST_METRICS])

    def close(self, *, complete: bool) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if complete else "KILLED")


def choose_mlflow_uri(run: TrackedRun) -> str:
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if given and not (given.startswith(("http://", "https://")) and not is_reachable(given)):
        return given
    # newer releases refuse a folder without it, and a database needs packages that mlflow-skinny has not
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return (run.folder / "mlruns").resolve().as_uri()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
