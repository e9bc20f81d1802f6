"""Results of a sweep: one row per cell, as text, CSV, Parquet or a DataFrame."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

from hpcjobs.errors import RequestError, nearest, require_packages
from hpcjobs.record import SUMMARY
from hpcjobs.record.figures import LOG_SOURCE, MORE, FigureResult, results_of
from hpcjobs.record.summary import flatten, read_summary
from hpcjobs.record.values import read_text
from hpcjobs.run.job_files import log_path, read_usable
from hpcjobs.sweeps.cell_status import CellStatus
from hpcjobs.sweeps.folder import Definition, SweepFolder

if TYPE_CHECKING:
    import pandas

COLUMNS: Final = {
    "state": "text: Slurm's name of it; MISSING: in no array",
    "exit_code": "count: of the cell",
    "elapsed_s": "seconds: from the start to the end of the cell",
    "nodes": "text: nodes in Slurm's notation",
    "job_id": "text: array task",
    "cell": "text: name of the cell",
    "error": "text: last line of the traceback",
    "traceback": "text: traceback of a Python function",
    "folder": "text: run folder of the cell",
    "log": "text: log file of the cell",
}
"""Columns of a run from the scheduler and from the files of its cell."""
_FACTS = tuple(COLUMNS)
_OWN = ("status", "exit_code", "job_id", "schema", "elapsed_s", "error")
"""Keys of a trainer's summary that are in the row already."""


class Results(NamedTuple):
    """One row per cell: parameters, state and other facts of the run, measurements."""

    params: list[str]
    measured: list[str]
    rows: list[dict[str, Any]]
    figure: str | None = None
    """The first figure of merit of the runs' logs."""
    figure_is_better: str = MORE
    """Which of two values of it is better: ``more`` or ``less``."""

    @property
    def columns(self) -> list[str]:
        """All columns, in the order of a table."""
        return [*self.params, "state", *self.measured, *_FACTS[1:]]

    def as_documents(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with parameters and measurements apart from the facts of the run."""
        return [
            {
                "params": {name: row[name] for name in self.params if name in row},
                "measured": {name: row[name] for name in self.measured if name in row},
                **{fact: row[fact] for fact in _FACTS},
            }
            for row in rows
        ]

    @property
    def usual_metric(self) -> tuple[str, bool]:
        """The default metric to compare cells by (figure of merit, or loss), and whether its largest value is best."""
        return (self.loss, False) if self.figure is None else (self.figure, self.figure_is_better == MORE)

    @property
    def loss(self) -> str:
        """The loss to compare cells by: the validation loss if the runs measured one."""
        return next(filter(_VALIDATION_LOSS.fullmatch, self.measured), "loss")

    def best(self, metric: str, *, largest: bool = False) -> dict[str, Any] | None:
        """The completed cell with the smallest (or largest) value of ``metric``; None: none has one.

        Raises RequestError: no cell measured that.
        """
        return next(iter(self.rank(metric, largest=largest)), None)

    def rank(self, metric: str, *, largest: bool = False) -> list[dict[str, Any]]:
        """The completed cells with a finite number for ``metric``, best first: NaN and infinity have no rank.

        Raises RequestError: no cell measured that.
        """
        if metric not in self.measured and metric not in _FACTS:
            hint = nearest(metric, self.measured) if self.measured else "no cell has a summary.json that can be used"
            raise RequestError(f"no cell has {metric!r}", hint=hint)
        compared = [row for row in self.rows if row["state"] == "COMPLETED" and _is_finite(row.get(metric))]
        return sorted(compared, key=lambda row: float(row[metric]), reverse=largest)

    def write_csv(self, file: TextIO) -> None:
        """Write the rows as CSV; missing values are empty."""
        writer = csv.DictWriter(file, self.columns, restval="")
        writer.writeheader()
        writer.writerows(self.rows)

    def frame(self) -> pandas.DataFrame:
        """The rows as a DataFrame; ``attrs["columns"]`` has the meaning of each column."""
        import pandas

        frame: pandas.DataFrame = pandas.DataFrame(
            [{name: row.get(name) for name in self.columns} for row in self.rows]
        )
        meanings = dict.fromkeys(self.params, "parameter of the sweep")
        meanings |= dict.fromkeys(self.measured, "from summary.json, in the unit of the program")
        frame.attrs["columns"] = {name: (meanings | COLUMNS)[name] for name in self.columns}
        return frame

    def write_parquet(self, path: Path) -> None:
        """The rows as a Parquet file.

        Raises HpcJobsError: polars is not installed.
        """
        require_packages("polars", purpose="Parquet")
        import polars

        from hpcjobs.pages import save_parquet

        columns = {name: [row.get(name) for row in self.rows] for name in self.columns}
        save_parquet(path, polars.DataFrame(columns, strict=False))


_VALIDATION_LOSS = re.compile(r"(?:.*[./])?(?:evaluation|eval|validation|valid|val)[._/]?loss")


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def collect_results(folder: SweepFolder, cell_statuses: Sequence[CellStatus]) -> Results:
    """One row per cell, in the order of ``cell_statuses``."""
    names = {name: _column(name) for cell_status in cell_statuses for name in cell_status.cell.params}
    taken = {*names.values(), *_FACTS}
    rows: list[dict[str, Any]] = []
    measured: dict[str, None] = {}
    definition = folder.definition
    first: tuple[str, FigureResult] | None = None
    for cell_status in cell_statuses:
        figures, others = _read_summary(folder, cell_status)
        first = first or next(iter(figures.items()), None)
        known = [*((name, figure.value) for name, figure in figures.items()), *others]
        values = {key if key not in taken else f"result.{key}": value for key, value in known}
        measured |= dict.fromkeys(values)
        given = {names[name]: _parse_value(text) for name, text in cell_status.cell.params.items()}
        rows.append(given | values | _facts(folder, cell_status, definition))
    columns = list(names.values()), list(measured), rows
    if first is None:
        return Results(*columns)
    name = first[0] if first[0] not in taken else f"result.{first[0]}"
    return Results(*columns, figure=name, figure_is_better=first[1].better)


def _column(param: str) -> str:
    """The column of a parameter; one with the name of a fact about the run (``nodes``) is ``param.nodes``."""
    return f"param.{param}" if param in _FACTS else param


def _parse_value(text: str | None) -> str | int | float | None:
    """The value as a number; other text, and integers that would be written differently (``007``), stay text."""
    for kind in (int, float):
        try:
            value = kind(text or "")
        except ValueError:
            continue
        return value if kind is float or str(value) == text else text
    return text


def _read_summary(
    folder: SweepFolder, cell_status: CellStatus
) -> tuple[dict[str, FigureResult], list[tuple[str, Any]]]:
    """The figures and the other values, flattened, of the cell's summary.json; empty without one that can be used."""
    path = folder.cell_dir(cell_status.cell.id) / SUMMARY
    summary = read_usable(path, lambda: read_summary(path))
    if summary is None:
        return {}, []
    figures = results_of(summary)
    if summary.get("source") == LOG_SOURCE:
        return figures, []
    config = summary.get("config")
    left_out = {*_OWN, *(("figures",) if figures else ()), *(("config",) if isinstance(config, dict) else ())}
    return figures, list(flatten({key: value for key, value in summary.items() if key not in left_out}))


def _facts(folder: SweepFolder, cell_status: CellStatus, definition: Definition) -> dict[str, Any]:
    own, record = cell_status.own, cell_status.record
    exit_code = own.exit_code if own is not None and own.state.ended else record.reported_code if record else None
    elapsed = own.ended - own.started if own is not None and own.ended and own.started else None
    cell_dir = folder.cell_dir(cell_status.cell.id)
    traceback = _traceback(cell_dir)
    return {
        "state": state_name(cell_status),
        "exit_code": exit_code,
        "elapsed_s": elapsed,
        "nodes": own.nodes if own is not None else record.node_list if record else None,
        "job_id": cell_status.job_id,
        "cell": cell_status.cell.id,
        "error": traceback.splitlines()[-1] if traceback else None,
        "traceback": traceback,
        "folder": str(cell_dir),
        "log": str(log_file(folder, cell_status, definition)) if cell_status.job_id else None,
    }


def state_name(cell_status: CellStatus) -> str:
    """The state by Slurm's name; MISSING for a cell that is in no array."""
    return "MISSING" if cell_status.state is None else cell_status.state.value


def log_file(folder: SweepFolder, cell_status: CellStatus, definition: Definition) -> Path | None:
    """Log of the cell: the array task's, or a separate file if a task runs several cells."""
    if cell_status.chunk is None or cell_status.job_id is None:
        return None
    if cell_status.chunk.pack > 1:
        return folder.cell_dir(cell_status.cell.id) / "output.log"
    name = definition.job_of(cell_status.chunk.size).name
    return log_path(folder.chunk_dir(cell_status.chunk.number), name, cell_status.job_id)


def _traceback(cell_dir: Path) -> str | None:
    """Traceback of a Python function that raised an error."""
    path = cell_dir / "error.txt"
    return (read_usable(path, lambda: read_text(str(path))) or "").strip() or None
