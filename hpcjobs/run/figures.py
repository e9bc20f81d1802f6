"""The figure of merit of a run, from its log (`figures:`, ``--metric``) or from the program's summary.json."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from hpcjobs.files import read_regular
from hpcjobs.job.models import Job
from hpcjobs.record.figures import FigureResult, read_results
from hpcjobs.record.names import FIGURES_LOG, SUMMARY
from hpcjobs.record.state import State
from hpcjobs.record.summary import Throughput
from hpcjobs.run.job_files import read_json

_MOST_PROBLEMS: Final = 20
_WITHOUT_RECORD: Final = (None, State.UNKNOWN)
_WITH_FIGURE: Final = (State.COMPLETED, State.TIMEOUT)


class Rate(NamedTuple):
    """A figure where more is better; a time (``better: less``) is inverted."""

    name: str
    """Name of the figure; ``throughput`` if the program wrote it."""
    value: float
    """Above 0."""
    unit: str

    @property
    def label(self) -> str:
        """The unit; of a figure without one its name."""
        return self.unit or self.name


class _Written(msgspec.Struct):
    throughput: Throughput | None = None


def read_figures(run_dir: Path) -> dict[str, FigureResult]:
    """The figures that were read from the log of a run that has ended; the first one is the figure of the run."""
    return read_results(run_dir / SUMMARY)


def read_problems(run_dir: Path) -> list[str]:
    """The problems that the reader of an ended run's log reported; empty without problems or without a reader."""
    try:
        text = read_regular(run_dir / FIGURES_LOG).decode("utf-8", "replace")
    except OSError:
        return []
    return [line.removeprefix("hpcjobs: ") for line in text.splitlines()[:_MOST_PROBLEMS]]


def has_reader(run_dir: Path) -> bool:
    """Whether figures of the run's log were asked for; False if the folder cannot be read."""
    return os.path.exists(run_dir / FIGURES_LOG)


def counts_as_measurement(state: str | None) -> bool:
    """Whether the figure of a run in this state counts: of one that failed or was cancelled it does not.

    A run that reached its time limit counts, as does one of which the scheduler has no record (None, UNKNOWN).
    """
    return state in _WITH_FIGURE or state in _WITHOUT_RECORD


def requested_figure(job: Job) -> str | None:
    """The name of the figure that ``--metric`` asks for first; None: none, or only figures of a file are read."""
    return next(iter(job.figures), None) if any(layer.spec.metric for layer in job.layers) else None


def read_rate(run_dir: Path, requested: str | None = None) -> Rate | None:
    """The figure of an ended run: the first one of its log, otherwise the program's throughput.

    ``run_dir``: the folder of the run, of the array task or of the cell. ``requested``: the only figure that counts.
    None: no positive figure.
    """
    figures = read_figures(run_dir)
    name = next(iter(figures), None) if requested is None else requested
    if name is not None:
        figure = figures.get(name)
        if figure is None or figure.value <= 0:
            return None
        return Rate(name, figure.throughput, figure.throughput_unit)
    written = _read_written(run_dir)
    if written is None or not math.isfinite(written.value) or written.value <= 0:
        return None
    return Rate("throughput", written.value, written.unit)


def explain_missing_rate(run_dir: Path, requested: str | None = None) -> str | None:
    """Why `read_rate` gives nothing for an ended run; None: nothing is known."""
    figures = read_figures(run_dir)
    name = next(iter(figures), None) if requested is None else requested
    if name is not None and (figure := figures.get(name)) is not None:
        return f"figure {name} is {figure.value:g}, and only one above 0 can be compared"
    problems = read_problems(run_dir)
    if requested is not None:
        own = [problem for problem in problems if problem.startswith(f"figure {requested}:")]
        return "; ".join(own or problems) or f"figure {requested} was not read from its log"
    if problems:
        return "; ".join(problems)
    written = _read_written(run_dir)
    return None if written is None else f"the throughput is {written.value:g}, and only one above 0 can be compared"


def _read_written(run_dir: Path) -> Throughput | None:
    written = read_json(run_dir / SUMMARY, _Written)
    return None if written is None else written.throughput
