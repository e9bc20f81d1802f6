"""The figure of merit of a run, from its log (`figures:`, ``--metric``) or from the program's summary.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from hpcjobs.files import read_regular
from hpcjobs.record.figures import FigureResult, read_results
from hpcjobs.record.names import FIGURES_LOG, SUMMARY
from hpcjobs.record.summary import Throughput
from hpcjobs.run.job_files import read_json

_MOST_PROBLEMS: Final = 20


class Rate(NamedTuple):
    """A figure where more is better; a time (``better: less``) is inverted."""

    name: str
    """Name of the figure; ``throughput`` if the program wrote it."""
    value: float
    """Above 0."""
    unit: str


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
    """Whether figures of the run's log were asked for."""
    return (run_dir / FIGURES_LOG).exists()


def read_rate(run_dir: Path) -> Rate | None:
    """The figure of an ended run: the first one of its log, otherwise the program's throughput.

    ``run_dir``: the folder of the run, of the array task or of the cell. None: no positive figure.
    """
    for name, figure in read_figures(run_dir).items():
        return Rate(name, figure.throughput, figure.throughput_unit) if figure.value > 0 else None
    written = read_json(run_dir / SUMMARY, _Written)
    if written is None or written.throughput is None:
        return None
    value = written.throughput.value
    return Rate("throughput", value, written.throughput.unit) if math.isfinite(value) and value > 0 else None
