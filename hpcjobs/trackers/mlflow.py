"""MLflow: the server of MLFLOW_TRACKING_URI, or RUN_FOLDER/mlruns if none is set or it does not answer."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hpcjobs.trackers import MetricPoint, TrackedRun, is_reachable, read_run_id, write_run_id

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 500  # of one request, by MLflow's REST interface


class MlflowTracker:
    """A run of an MLflow server or folder."""

    def __init__(self, run: TrackedRun) -> None:
        uri = choose_uri(run)
        self._client = MlflowClient(tracking_uri=uri)
        run_id = read_run_id(run, "mlflow")
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.name)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = self._client.create_run(experiment_id, run_name=run.folder.name).info.run_id
            write_run_id(run, "mlflow", run_id)
            params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in run.config.items() if value is not None]
            for start in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(run_id, params=params[start : start + MOST_PARAMS])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id
        self.place = f"{uri}, run {run_id}"

    def write(self, points: Sequence[MetricPoint]) -> None:
        metrics = [
            Metric(name, value, int(1000 * point.time_s), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MOST_METRICS])

    def close(self, *, complete: bool) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if complete else "KILLED")


def choose_uri(run: TrackedRun) -> str:
    given = os.environ.get("MLFLOW_TRACKING_URI", "")
    if given and not (given.startswith(("http://", "https://")) and not is_reachable(given)):
        return given
    # newer releases refuse a folder without it, and a database needs packages that mlflow-skinny has not
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return (run.folder / "mlruns").resolve().as_uri()
