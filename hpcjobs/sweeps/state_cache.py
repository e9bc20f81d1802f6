"""The state files of completed cells, kept in one file: a completed cell does not change, so it is read once."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from hpcjobs.files import read_regular, write_beside
from hpcjobs.record.names import STATE
from hpcjobs.record.state import StateFile, read_state_file
from hpcjobs.record.values import convert, to_json
from hpcjobs.run.job_files import read_usable
from hpcjobs.scheduler.base import State
from hpcjobs.sweeps.folder import SweepFolder

_FILE = "completed.json"


def read_states(folder: SweepFolder) -> dict[str, StateFile]:
    """The latest state of each started cell, by id. Cells that were completed before are not read again."""
    started = folder.started_cells()
    known = {cell: state for cell, state in _read_cache(folder).items() if cell in started}
    read = {cell: read_cell_state(folder, cell) for cell in started - known.keys()}
    new = {cell: state for cell, state in read.items() if state is not None}
    completed = {cell: state for cell, state in new.items() if state.state is State.COMPLETED}
    if completed:
        with contextlib.suppress(OSError):  # another user's folder, a full disk: the next call reads them again
            write_beside(folder.path / _FILE, msgspec.json.encode(to_json(known | completed)))
    return known | new


def _read_cache(folder: SweepFolder) -> dict[str, StateFile]:
    try:
        raw = msgspec.json.decode(read_regular(folder.path / _FILE), type=dict[str, dict[str, Any]])
        return {cell: convert(state, StateFile) for cell, state in raw.items()}
    except (FileNotFoundError, ValueError):  # none yet, or of another version
        return {}


def read_cell_state(folder: SweepFolder, cell: str) -> StateFile | None:
    """The latest state of a cell; None before it starts, and, with a warning, if the file cannot be used."""
    path = folder.cell_dir(cell) / STATE
    return read_usable(path, lambda: read_state_file(path))
