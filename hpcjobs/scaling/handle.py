"""A scaling study in Python: `scale` describes it, its handle submits the runs and gives their table."""

from __future__ import annotations

import operator
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final

from hpcjobs.errors import RequestError, require_packages
from hpcjobs.scaling import study as study_file
from hpcjobs.scaling.study import Size, Study
from hpcjobs.scaling.study_sweep import submit_study, sweep_of
from hpcjobs.site.checks import check_name
from hpcjobs.site.library import default_site

if TYPE_CHECKING:
    import pandas as pd

    from hpcjobs.scaling.analysis import Analysis

COLUMNS: Final = {
    "series": "text: values of what varies beside the sizes; empty: nothing does",
    "nodes": "count: nodes of a run",
    "ranks": "count: processes of a run",
    "runs": "count: runs that were measured",
    "unit": "text: unit of the throughput",
    "throughput": "see unit: geometric mean of the runs",
    "throughput_low": "see unit: lower bound of its 95 % interval",
    "throughput_high": "see unit: upper bound of it",
    "speedup": "ratio: throughput over that of the smallest size",
    "speedup_low": "ratio: lower bound of its 95 % interval",
    "speedup_high": "ratio: upper bound of it",
    "efficiency": "share, 0 to 1: speed-up over the ideal one",
    "efficiency_low": "share: lower bound of its 95 % interval",
    "efficiency_high": "share: upper bound of it",
    "step_s": "seconds: median of a step",
    "compute": "share of a step: neither communication nor data wait",
    "communication": "share of a step: waiting for other ranks",
    "data_wait": "share of a step: waiting for a batch",
    "checkpoint": "share: time of checkpoints over that of the steps",
    "epoch_s": "seconds: the steps of an epoch",
    "cpu_efficiency": "share, 0 to 1: CPU time over allocated CPUs x time",
    "gpu_utilization": "share, 0 to 1: mean of time and GPUs",
    "queue_wait_s": "seconds: median wait in the queue",
    "energy_j": "joules: median of a run",
    "energy_source": "text: measured, nvml or modelled",
    "cost_per_million": "money, see currency: of a million samples",
    "currency": "text",
}
"""Columns of `ScalingStudy.results`: unit and meaning. Null: not measured."""
RUN_COLUMNS: Final = {
    "nodes": "count: nodes of the run",
    "ranks": "count: processes of the run",
    "ntasks_per_node": "count: processes on each node",
    "repeat": "count: number of the run among those of its size, from 1",
    "job_id": "text: job or array task",
    "state": "text: Slurm's name of it",
    "throughput": "see unit: figure of the run; empty: it gave none",
    "unit": "text: unit of the throughput",
    "elapsed_s": "seconds: as the program measured it, else of the job",
    "step_s": "seconds: median of a step",
    "communication_s": "seconds: median of a step's wait for other ranks",
    "data_wait_s": "seconds: median of a step's wait for a batch",
    "checkpoint_share": "share: time of checkpoints over that of the steps",
    "samples": "count: samples that were processed",
    "epoch_s": "seconds: the steps of an epoch",
    "mfu": "share, 0 to 1: model FLOPs utilization",
    "loss": "number: last one",
    "cpu_efficiency": "share, 0 to 1: CPU time over allocated CPUs x time",
    "gpu_utilization": "share, 0 to 1: mean over time and GPUs",
    "queue_wait_s": "seconds: wait in the queue",
    "energy_j": "joules: of all attempts",
    "energy_source": "text: measured, nvml or modelled",
    "cost": "money, see currency: of all attempts",
    "currency": "text: of cost",
    "node_list": "text: in Slurm's notation",
    "source": "text: where the job was read: sacct, squeue, local, ...",
    "code": "text: version of the code",
    "image": "text: container image",
    "node_model": "text: model of the device or CPU",
    "torch_version": "text: version of torch",
    "run_dir": "text: folder that the run wrote to",
    "partition": "text: partition it ran in",
    "ended": "time, UTC: its end",
    "series": "text: values of what varies beside the sizes; empty: nothing does",
    "log": "text: log file",
    "problem": "text: why the run has no figure",
}
"""Columns of `ScalingStudy.runs`: unit and meaning. Null: not known."""
_NOT_NUMBERS: Final = ("text", "count")


class ScalingStudy:
    """One program at several sizes. The file NAME.study.json in the current folder remembers it."""

    def __init__(self, study: Study, path: Path) -> None:
        self._study, self.path = study, path

    @property
    def name(self) -> str:
        return self._study.name

    def submit(self, *, allow_mixed: bool = False) -> None:
        """Submit the runs that are missing; returns at once.

        Args:
            allow_mixed: also if the code has changed since the earlier runs.

        Raises:
            RequestError: the file holds another study, or a size does not fit the site. SchedulerError: refused.
        """
        self._study = submit_study(self._study, self.path, allow_mixed=allow_mixed)

    def wait(self, *, timeout_s: float | None = None) -> Counter[str]:
        """Block until no run is queued or running; return the number of runs in each state.

        Raises TimeoutError: ``timeout_s`` seconds have passed.
        """
        return sweep_of(self._study).wait(timeout_s=timeout_s)

    def runs(self) -> pd.DataFrame:
        """One row per run; ``attrs["columns"]`` has unit and meaning of each column."""
        require_packages("pandas", "polars", purpose="a table of runs")
        from hpcjobs.jobstats.dataframe import to_pandas
        from hpcjobs.scaling.runs import read_runs

        frame = to_pandas(read_runs(self._study))
        frame.attrs["columns"] = dict(RUN_COLUMNS)
        return frame

    def results(self, *, target: float = 0.8, allow_mixed: bool = False) -> pd.DataFrame:
        """One row per size; ``attrs["columns"]`` has unit and meaning of each column, ``attrs["summary"]`` the
        sentences of the report.

        Args:
            target: efficiency of the knee, between 0 and 1.
            allow_mixed: accept runs of different code, images or node models.

        Raises:
            HpcJobsError: pandas, polars or scipy is not installed. RequestError: no run has ended with a figure yet.
        """
        require_packages("pandas", "polars", "scipy", purpose="the results of a study")
        import pandas as pd

        analyses = self._analyse(target, allow_mixed)
        rows = []
        for series, analysis in analyses.items():
            for group in analysis.groups:
                row: dict[str, Any] = group._asdict() | {"series": series, "unit": analysis.unit}
                for name in ("throughput", "speedup", "efficiency"):
                    row[name], row[f"{name}_low"], row[f"{name}_high"] = getattr(group, name)[:3]
                rows.append({name: row[name] for name in COLUMNS})
        summary = [f"{series}: {line}" if series else line for series, one in analyses.items() for line in one.summary]
        per = next(iter(analyses.values())).per
        numbers = [name for name, what in COLUMNS.items() if what.partition(":")[0] not in _NOT_NUMBERS]
        frame: pd.DataFrame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(numbers, "float64"))
        frame.attrs.update(columns=dict(COLUMNS), summary=summary, per=per)
        return frame

    def largest_efficient(self, *, target: float = 0.8) -> int | None:
        """The number of nodes (or ranks) up to which an efficiency of ``target`` was measured; None: at no size."""
        require_packages("polars", "scipy", purpose="the results of a study")
        analyses = self._analyse(target, allow_mixed=False)
        if len(analyses) > 1:
            raise RequestError(f"study {self.name} has several series: {'; '.join(analyses)}", hint="results() has all")
        return next(iter(analyses.values())).knee.measured

    def report(self, folder: str | Path | None = None, *, target: float = 0.8, allow_mixed: bool = False) -> Path:
        """Write the page of `hpcjobs report scaling` to ``folder`` (default NAME-report); return its index.html."""
        require_packages("polars", "scipy", "matplotlib", purpose="the report of a study")
        from hpcjobs.pages import page_folder
        from hpcjobs.scaling import comparison, page
        from hpcjobs.scaling.runs import read_runs

        directory = page_folder(self.name, "report") if folder is None else Path(folder)
        series = list(self._analyse(target, allow_mixed).items())
        page.write(
            self._study, dict(series), read_runs(self._study), directory,
            comparisons=[(name, comparison.compare(other, series[0][1])) for name, other in series[1:]],
            picture=comparison.draw(series) if len(series) > 1 else None,
        )  # fmt: skip
        return directory / "index.html"

    def _analyse(self, target: float, allow_mixed: bool) -> dict[str, Analysis]:
        """An analysis of each series; a study without axes has one series without a name."""
        from hpcjobs.scaling.analysis import analyse_series
        from hpcjobs.scaling.runs import read_runs

        return analyse_series(read_runs(self._study), target=target, allow_mixed=allow_mixed)


def scale(
    program: str | Sequence[str],
    sizes: Iterable[int | tuple[int, int]],
    *,
    site: str | None = None,
    name: str | None = None,
    weak: bool = False,
    repeats: int = 3,
    one_at_a_time: bool = False,
    launcher: str | None = None,
    env: dict[str, str] | None = None,
    metric: str | Sequence[str] = (),
    over: Mapping[str, Sequence[str | int]] | None = None,
    **options: str | int | bool | None,
) -> ScalingStudy:
    """A scaling study of a trainer (``"ddp"``) or a command (``["train.py", "--batch-size", "256"]``).

    No run is submitted before ``.submit()``; called again, it submits the missing runs.

    Args:
        sizes: numbers of nodes, or pairs of nodes and tasks per node.
        weak: constant batch per rank; default a constant global batch, the ``--batch-size`` divided by the ranks.
        repeats: runs of each size.
        one_at_a_time: each run waits for the one before.
        metric: figures of merit of the log, as for ``--metric``; the first one is compared.
        over: further axes, as for ``--over``: an option of the job or a ``{NAME}`` of the program, and its values.
        options: sbatch options of every run, as for `hpcjobs.plan`.

    Raises:
        RequestError: a name, a size, the number of repeats or an axis is illegal, or there is no program.
    """
    command = shlex.split(program) if isinstance(program, str) else list(program)
    if not command:
        raise RequestError("scale needs a program", hint='"ddp", or ["train.py", "--batch-size", "256"]')
    title = name or PurePath(command[0]).stem.replace(".", "-")[:100]
    try:
        check_name(title, "name")
    except ValueError as error:
        raise RequestError(str(error), hint="name= names the study and its file, NAME.study.json") from error
    pairs = _read_sizes(list(sizes))
    runs = _read_count(repeats)
    if runs is None:
        raise RequestError(f"repeats={repeats}: write the number of runs of each size, at least 1")
    axes = {axis.replace("-", "_"): tuple(map(str, values)) for axis, values in (over or {}).items()}
    if empty := [axis for axis, values in axes.items() if not values]:
        raise RequestError(f"over: {', '.join(empty)} has no values", hint='over={"launcher": ["srun", "torchrun"]}')
    study = Study(
        name=title,
        site=site or default_site(),
        mode="weak" if weak else "strong",
        program=tuple(command),
        sizes=tuple(Size(nodes=nodes, ntasks_per_node=tasks) for nodes, tasks in pairs),
        repeats=runs,
        options=options,
        launcher=launcher,
        env=env or {},
        metric=(metric,) if isinstance(metric, str) else tuple(metric),
        axes=axes,
        one_at_a_time=one_at_a_time,
    )
    return ScalingStudy(study, study_file.path_of(title))


def _read_sizes(sizes: Sequence[int | tuple[int, int]]) -> list[tuple[int, int]]:
    pairs = []
    for size in sizes:
        counts = [_read_count(count) for count in (size if isinstance(size, tuple) else (size, 1))]
        if len(counts) != 2 or counts[0] is None or counts[1] is None:
            break
        pairs.append((counts[0], counts[1]))
    if not sizes or len(pairs) < len(sizes):
        raise RequestError(f"sizes {sizes}: write numbers of nodes, or pairs of nodes and tasks per node")
    return pairs


def _read_count(count: object) -> int | None:
    """The count as an int, also one of numpy; None: not a whole number from 1 on."""
    try:
        value = operator.index(count)  # type: ignore[arg-type]
    except TypeError:
        return None
    return value if value >= 1 else None


def find_study(name: str) -> ScalingStudy:
    """The study in NAME.study.json.

    Raises ConfigError: the file is missing, or is not a study.
    """
    path = study_file.path_of(name)
    return ScalingStudy(study_file.read(path), path)
