"""What the cells of a sweep gave: one row each, as text, CSV, Parquet or a DataFrame."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from hpcjobs.errors import RequestError, nearest
from hpcjobs.run.describe import flat
from hpcjobs.run.folder import log_path
from hpcjobs.sweeps.folder import Definition, SweepFolder
from hpcjobs.sweeps.standing import Standing

if TYPE_CHECKING:
    import pandas

_FACTS = ("state", "exit_code", "elapsed_s", "nodes", "job_id", "cell", "error", "traceback", "folder", "log")
_OWN = ("status", "exit_code", "job_id", "schema", "elapsed_s", "error")
"""Keys of a trainer's summary that the row's facts tell already."""


class Results(NamedTuple):
    """One row per cell: parameters, what the scheduler and the cell say of the run, what the run measured."""

    params: list[str]
    measured: list[str]
    rows: list[dict[str, Any]]

    @property
    def columns(self) -> list[str]:
        """All columns, in the order of a table."""
        return [*self.params, "state", *self.measured, *_FACTS[1:]]

    def best(self, metric: str, *, largest: bool = False) -> dict[str, Any] | None:
        """The completed cell with the smallest (or largest) value of ``metric``; None: none has one.

        Raises:
            RequestError: no cell measured that.
        """
        return next(iter(self.ranked(metric, largest=largest)), None)

    def ranked(self, metric: str, *, largest: bool = False) -> list[dict[str, Any]]:
        """The completed cells with a finite number for ``metric``, best first: NaN and infinity have no rank.

        Raises:
            RequestError: no cell measured that.
        """
        if metric not in self.measured and metric not in _FACTS:
            raise RequestError(f"no cell has {metric!r}", hint=nearest(metric, self.measured))
        compared = [row for row in self.rows if row["state"] == "COMPLETED" and _is_finite(row.get(metric))]
        return sorted(compared, key=lambda row: float(row[metric]), reverse=largest)

    def write_csv(self, file: TextIO) -> None:
        """The rows as CSV; what was not measured is empty."""
        writer = csv.DictWriter(file, self.columns, restval="")
        writer.writeheader()
        writer.writerows(self.rows)

    def frame(self) -> pandas.DataFrame:
        """The rows as a DataFrame, numbers as numbers.

        Raises:
            RequestError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise RequestError("a DataFrame needs pandas", hint="pip install 'hpcjobs[report]'") from error
        frame: pandas.DataFrame = pandas.DataFrame(
            [{name: row.get(name) for name in self.columns} for row in self.rows]
        )
        return frame

    def write_parquet(self, path: Path) -> None:
        """The rows as a Parquet file.

        Raises:
            RequestError: polars is not installed.
        """
        try:
            import polars
        except ImportError as error:
            raise RequestError("Parquet needs polars", hint="pip install 'hpcjobs[report]'") from error
        columns = {name: [row.get(name) for row in self.rows] for name in self.columns}
        polars.DataFrame(columns, strict=False).write_parquet(path)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def results_of(folder: SweepFolder, standings: Sequence[Standing]) -> Results:
    """The rows of a sweep's wanted cells, in their order."""
    names = {name: _column(name) for standing in standings for name in standing.cell.params}
    taken = {*names.values(), *_FACTS}
    rows: list[dict[str, Any]] = []
    measured: dict[str, None] = {}
    definition = folder.definition
    for standing in standings:
        found = {key if key not in taken else f"result.{key}": value for key, value in _measured(folder, standing)}
        measured |= dict.fromkeys(found)
        given = {names[name]: _typed(text) for name, text in standing.cell.params.items()}
        rows.append(given | found | _facts(folder, standing, definition))
    return Results(list(names.values()), list(measured), rows)


def _column(param: str) -> str:
    """The column of a parameter; one with the name of a fact about the run (``nodes``) is ``param.nodes``."""
    return f"param.{param}" if param in _FACTS else param


def _typed(text: str | None) -> str | int | float | None:
    """A number where the text is the one way to write it."""
    for kind in (int, float):
        try:
            value = kind(text or "")
        except ValueError:
            continue
        return value if kind is float or str(value) == text else text
    return text


def _measured(folder: SweepFolder, standing: Standing) -> list[tuple[str, Any]]:
    """summary.json of the cell's run folder, flat; nothing before it has one, or for one that is no object."""
    try:
        summary = json.loads((folder.cell_dir(standing.cell.id) / "summary.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if not isinstance(summary, dict):
        return []
    config = summary.get("config")
    kept = {k: v for k, v in summary.items() if k not in _OWN and not (k == "config" and isinstance(config, dict))}
    return list(flat(kept))


def _facts(folder: SweepFolder, standing: Standing, definition: Definition) -> dict[str, Any]:
    own, record = standing.own, standing.record
    exit_code = own.exit_code if own is not None and own.state.ended else record.exit_code if record else None
    elapsed = own.ended - own.started if own is not None and own.ended and own.started else None
    cell_dir = folder.cell_dir(standing.cell.id)
    told = _traceback(cell_dir)
    return {
        "state": state_word(standing),
        "exit_code": exit_code,
        "elapsed_s": elapsed,
        "nodes": own.nodes if own is not None else record.node_list if record else None,
        "job_id": standing.job_id,
        "cell": standing.cell.id,
        "error": told.splitlines()[-1] if told else None,
        "traceback": told,
        "folder": str(cell_dir),
        "log": str(log_of(folder, standing, definition)) if standing.job_id else None,
    }


def state_word(standing: Standing) -> str:
    """The state in Slurm's words; MISSING for a cell that nobody runs."""
    return "MISSING" if standing.state is None else standing.state.value


def log_of(folder: SweepFolder, standing: Standing, definition: Definition) -> Path | None:
    """Where the cell prints: the array task's log, or one of its own when tasks hold several cells."""
    if standing.chunk is None or standing.job_id is None:
        return None
    if standing.chunk.pack > 1:
        return folder.cell_dir(standing.cell.id) / "output.log"
    name = definition.job_of(standing.chunk.size).name
    return log_path(folder.chunk_dir(standing.chunk.number), name, standing.job_id)


def _traceback(cell_dir: Path) -> str | None:
    """What a Python function raised, as text."""
    try:
        return (cell_dir / "error.txt").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
