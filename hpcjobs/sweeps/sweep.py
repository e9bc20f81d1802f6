"""A sweep in Python: the object behind ``hpcjobs.sweep`` and the command line.

A Python function is pickled once; each cell's line in cells.sh has its keywords, like any parameters.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hpcjobs.errors import HpcJobsError, HpcJobsWarning, UnknownJobError, require_packages
from hpcjobs.job.layers import make_spec
from hpcjobs.job.models import Layer
from hpcjobs.run import submission
from hpcjobs.run.wait import OUTAGE_S, POLL_S, QUEUE_S
from hpcjobs.scheduler.base import Outage, Report, discard
from hpcjobs.site.models import Site
from hpcjobs.sweeps import submit
from hpcjobs.sweeps.cell_status import CellStatus, cell_statuses, read_cell_state
from hpcjobs.sweeps.cells import Passing, Point
from hpcjobs.sweeps.folder import Definition, SweepFolder, find_folder, folder_name, open_folder, remember
from hpcjobs.sweeps.results import Results, collect_results, state_name
from hpcjobs.sweeps.spec import define
from hpcjobs.sweeps.submit import Outcome

if TYPE_CHECKING:
    import pandas
import base64
import hashlib
import re
import types
from typing import Any

import cloudpickle

from hpcjobs.errors import RequestError
from hpcjobs.sweeps.cells import Cell, Program, check_points, format_value, make_cell
from hpcjobs.units import human_bytes

LARGEST_ARGUMENTS, LARGEST_FUNCTION = 64 << 10, 64 << 20
"""Bytes of a cell's keywords (a variable of the environment holds 128 KiB), and of the function itself."""
CALL_MODULE = ("hpcjobs.runtime.call",)


def pickle_function(function: Callable[..., object]) -> bytes:
    """The function as the cells will load it.

    Raises RequestError: it cannot be pickled (it holds an open file, a lock, a GPU tensor ...), or is too large.
    """
    data = _pickle(function, f"function {name_of(function)}")
    if len(data) > LARGEST_FUNCTION:
        raise RequestError(
            f"function {name_of(function)} takes {human_bytes(len(data))} with what it refers to;"
            f" the limit is {human_bytes(LARGEST_FUNCTION)}",
            hint="load data inside the function",
        )
    return data


def arguments(point: Point) -> str:
    """A cell's keywords for its line of shell.

    Raises RequestError: not picklable, or too large.
    """
    data = _pickle(dict(point), f"the arguments {', '.join(point)}")
    if len(data) > LARGEST_ARGUMENTS:
        raise RequestError(
            f"the arguments {', '.join(point)} of a cell take {human_bytes(len(data))};"
            f" the limit is {human_bytes(LARGEST_ARGUMENTS)}",
            hint="write them to a file and pass its path",
        )
    return base64.b64encode(data).decode()


def _pickle(value: object, what: str) -> bytes:
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # pickling runs code of the user's
        raise RequestError(
            f"{what} cannot be pickled: {error}", hint="open files and locks inside the function"
        ) from error
    return data


def name_of(function: Callable[..., object]) -> str:
    """``train`` of ``train``, ``functools.partial(train)`` and of an instance of ``Train``."""
    inner = getattr(function, "func", function)
    name = str(getattr(inner, "__name__", type(inner).__name__))
    return re.sub(r"\W", "", name, flags=re.ASCII) or "function"


def identity_of(function: Callable[..., object]) -> str:
    """Hash of the function's code, independent of its place in the file; for other callables, hash of the pickle."""
    digest = hashlib.sha256(name_of(function).encode())
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        _add_code(digest, code)
        digest.update(repr(getattr(function, "__defaults__", None)).encode())
        closure = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        digest.update(_pickle(closure, f"what {name_of(function)} refers to") if closure else b"")
    else:
        digest.update(_pickle(function, f"function {name_of(function)}"))
    return digest.hexdigest()


def _add_code(digest: Any, code: types.CodeType) -> None:
    digest.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


def cells_of(function: Callable[..., object], points: Sequence[Point]) -> list[Cell]:
    """One cell per point. Values other than text and numbers are identified by their pickle and shown by their repr."""
    what = Program(argv=(), identity=identity_of(function), passing="env", trainer=False)
    cells: dict[str, Cell] = {}
    for point in check_points(points):
        keys = {name: _make_key(name, value) for name, value in point.items()}
        shown = {name: _describe_value(name, value) for name, value in point.items()}
        cell = replace(make_cell(what, keys), params=shown, arguments=arguments(point))
        cells.setdefault(cell.id, cell)
    return list(cells.values())


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _make_key(name: str, value: object) -> object:
    return value if _is_plain(value) else hashlib.sha256(_pickle(value, f"parameter {name}")).hexdigest()


def _describe_value(name: str, value: object) -> str | None:
    return format_value(name, value) if _is_plain(value) else repr(value)[:80]


class CellWatch:
    """Watches the cells that have not ended. It reads the files of cells that have started, and no others."""

    def __init__(self, folder: SweepFolder, now: list[CellStatus]) -> None:
        self._folder = folder
        self.counts: Counter[str] = Counter()
        self._waiting: dict[str, CellStatus] = {}
        self.renew(now)

    def renew(self, now: list[CellStatus]) -> None:
        """Replace the states by those from the scheduler."""
        self._waiting = {cell_status.cell.id: cell_status for cell_status in now if cell_status.open}
        self._seen = {cell_status.cell.id: state_name(cell_status) for cell_status in now}
        self.counts = Counter(self._seen.values())

    def look(self) -> bool:
        """Read new states; False once every cell has ended."""
        for cell in self._folder.started_cells() & self._waiting.keys():
            state = read_cell_state(self._folder, cell)
            attempt = self._waiting[cell].job_id
            if state is None or (attempt is not None and state.job_id != attempt and state.state.value != "COMPLETED"):
                continue
            self.counts[self._seen[cell]] -= 1
            self.counts[state.state.value] += 1
            self._seen[cell] = state.state.value
            if state.state.ended:
                del self._waiting[cell]
        return bool(self._waiting)


def wait_for_cells(
    folder: SweepFolder,
    cell_statuses: Callable[[], list[CellStatus]],
    *,
    deadline: float | None = None,
    progress: Callable[[Counter[str]], None] | None = None,
    pause: Callable[[float], None] = time.sleep,
    report: Report = discard,
) -> None:
    """Return when no cell is queued, running or waiting to be submitted.

    Errors of a scheduler that has answered before are passed to ``report`` and survived.

    Raises SchedulerError: the scheduler does not answer the first question. TimeoutError: ``deadline`` (of the
    monotonic clock) has passed.
    """
    outage = Outage(report)
    watch = CellWatch(folder, outage.ask(cell_statuses) or [])
    due, reported = time.monotonic() + QUEUE_S, None
    while True:
        more = watch.look()
        if progress is not None and watch.counts != reported:
            reported = watch.counts.copy()
            progress(reported)
        if time.monotonic() >= due or not (more or outage.lasts):
            now = outage.ask(cell_statuses)
            due = time.monotonic() + (QUEUE_S if now is not None else OUTAGE_S)
            if now is not None:
                watch.renew(now)
                if not watch.look():
                    return
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"not ended in time: {dict(+watch.counts)}")
        pause(POLL_S)


Progress = Callable[[Counter[str]], None]
"""Called with the number of cells in each state, at the start and whenever it changes."""


class Sweep:
    """Many runs of one program. Its state is in its folder: another process may read it, resume or cancel."""

    def __init__(self, folder: SweepFolder, definition: Definition | None = None) -> None:
        self.folder = folder
        self.function: bytes | None = None
        """The pickled function that the cells call."""
        self._definition = definition

    def __repr__(self) -> str:
        return f"Sweep({str(self.folder.path)!r})"

    @property
    def definition(self) -> Definition:
        """The sweep's job and cells."""
        return self._definition or self.folder.definition

    @property
    def path(self) -> Path:
        """The sweep's folder."""
        return self.folder.path

    def submit(self) -> Outcome:
        """Submit the cells that are neither completed, queued nor running; returns at once.

        Raises SchedulerError: the scheduler refused or did not answer; arrays that it accepted before stay recorded.
        """
        definition = self.definition
        self.folder.require_own()
        remember(definition.name, self.folder)  # first: a killed submission can be resumed by name
        return self._once(lambda: submit.start(self.folder, definition, function=self.function))

    def require_resumable(self) -> None:
        """Raises RequestError: another user's sweep, or one of which a cell may run on another host or cluster."""
        self.folder.require_own()
        submit.require_here(self.folder)

    def resume(self) -> Outcome:
        """Submit the cells that failed or are missing, with the identity they had."""
        return self._once(lambda: submit.resume(self.folder))

    def _once(self, hand_over: Callable[[], Outcome]) -> Outcome:
        """Submit once if a laptop sends a command twice: a cell that has failed in between is not submitted again."""
        once = submission.next_submission()
        if once is None:
            return hand_over()
        with submission.finish_without_terminal():
            if (at := once.find_end()) is not None:
                clock = time.strftime("%F %H:%M:%S", time.localtime(at))
                text = (
                    f"sweep {self.definition.name} was submitted at {clock} by the same command, whose answer got lost"
                )
                warnings.warn(f"{text}; not again", HpcJobsWarning, stacklevel=3)
                return submit.look(self.folder)
            once.begin(self.path)
            try:
                outcome = hand_over()
            except HpcJobsError:  # accepted arrays are in the sweep's folder
                once.forget()
                raise
            once.finish(self.path)
            return outcome

    def cancel(self) -> list[str]:
        """End every array of the sweep; return the ids that were cancelled."""
        return submit.cancel(self.folder)

    def cell_statuses(self) -> list[CellStatus]:
        """Status of each cell, in the order of the definition."""
        return cell_statuses(self.folder, submit.connect_to(self.folder.definition))

    def status(self) -> Counter[str]:
        """How many cells are in each state; MISSING: in no array, ``resume`` submits them."""
        return Counter(state_name(cell_status) for cell_status in self.cell_statuses())

    def wait(
        self, *, timeout_s: float | None = None, progress: Progress | None = None, report: Report = discard
    ) -> Counter[str]:
        """Block until no cell is queued or running; return the number of cells in each state.

        Raises TimeoutError: ``timeout_s`` seconds have passed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait_for_cells(self.folder, self.cell_statuses, deadline=deadline, progress=progress, report=report)
        return self.status()

    def table(self) -> Results:
        """One row per cell."""
        return collect_results(self.folder, self.cell_statuses())

    def results(self) -> pandas.DataFrame:
        """One row per cell: parameters, state, measurements, times, job ids, with units in ``attrs["columns"]``.

        Raises HpcJobsError: pandas is not installed.
        """
        require_packages("pandas", purpose="a DataFrame")
        return self.table().frame()


def find_sweep(name: str) -> Sweep:
    """The sweep of that name, or in that folder.

    Raises UnknownJobError: no sweep has this name.
    """
    folder = find_folder(name)
    if not os.path.isfile(folder.path / "sweep.json"):
        raise UnknownJobError(f"{folder.path} is no sweep (no sweep.json)")
    return Sweep(folder)


def sweep(
    program: str | Sequence[str] | Callable[..., object],
    points: Sequence[Point],
    *,
    site: str | Site | None = None,
    spec: Layer | None = None,
    max_parallel: int | None = None,
    pack: int = 1,
    pack_parallel: int = 1,
    passing: Passing | None = None,
    made_by: str = "hpcjobs.sweep",
    **options: object,
) -> Sweep:
    """A sweep of a trainer (``"ddp"``), a command (``["./model", "{lr}"]``) or a Python function.

    No cell is submitted before ``.submit()``. A second call with other points and the same name keeps completed cells.
    ``options`` are as for `hpcjobs.plan`.

    Raises ConfigError: a file is wrong. RequestError: the job does not fit the site, or a point is illegal.
    """
    if callable(program):
        options["name"] = options.get("name") or name_of(program)
        request, defined = make_spec(CALL_MODULE, options), list[Point]([{}])
    else:
        request, defined = make_spec(program, options), list(points)
    definition = define(
        request, defined, site=site, spec=spec, max_parallel=max_parallel, pack=pack, pack_parallel=pack_parallel,
        passing="env" if callable(program) else passing, made_by=made_by,
    )  # fmt: skip
    if not callable(program):
        return of_definition(definition)
    made = of_definition(replace(definition, cells=cells_of(program, points)))
    made.function = pickle_function(program)
    return made


def of_definition(definition: Definition) -> Sweep:
    """The sweep of that name below the site's run_root. Raises RequestError: its name leads elsewhere."""
    if "/" in definition.name:
        raise RequestError(
            f"sweep {definition.name!r}: the name is a part of its folder's, and cannot have a slash",
            hint="--run-root FOLDER says where the folder is made",
        )
    folder = open_folder(Path(definition.job.run_root) / folder_name(definition.name))
    return Sweep(folder, definition)
