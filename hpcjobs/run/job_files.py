"""Reads the files of a submitted job, with its figures of merit, and keeps its accounting records in the run folder."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import HpcJobsWarning, RequestError, reason_of
from hpcjobs.files import (
    AnyPath,
    file_name,
    lock_file,
    open_regular,
    read_regular,
    write_beside,
)
from hpcjobs.job.models import Job
from hpcjobs.record import ACCOUNTING, ATTEMPTS, FIGURES_LOG, MANIFEST, REQUEUED, STATE, SUBMITTED, SUMMARY
from hpcjobs.record.control import Continuation, ControlDir
from hpcjobs.record.figures import FigureResult, read_results
from hpcjobs.record.manifest import Manifest, RequestedJob, read_manifest
from hpcjobs.record.state import Attempt, State, StateFile, read_history, read_state_file
from hpcjobs.record.summary import Throughput
from hpcjobs.run.index import Entry
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.units import array_indices, parent_id, task_ids

T = TypeVar("T")
_FEW_TASKS = 10


def log_path(run_dir: Path, name: str, job_id: str) -> Path:
    """Log file of a job or array task."""
    return run_dir / "logs" / f"{file_name(name)}_{job_id}.out"


def task_dir(run_dir: Path, job_id: str) -> Path:
    """The folder of one job or array task: ``123`` -> the run folder, ``123_4`` -> its ``4``."""
    _, _, index = job_id.partition("_")
    return run_dir / index if index else run_dir


def output_dir(run_dir: Path, job_id: str) -> Path:
    """The folder that the program of a job or array task writes to; for a task of a sweep the folder of its cell."""
    folder = task_dir(run_dir, job_id)
    cell = folder / "cell"
    return cell if os.path.isdir(cell) else folder


def read_job_manifest(run_dir: Path) -> Manifest[Job]:
    """The manifest of a run. Raises RequestError: it does not exist, or is from a version with other fields."""
    path = run_dir / MANIFEST
    try:
        manifest = read_manifest(run_dir)
        return Manifest(**{**vars(manifest), "job": msgspec.convert(manifest.job, Job)})
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise RequestError(
            f"{path} cannot be used: {reason_of(error)}", hint="a run can be compared or repeated by its manifest only"
        ) from error


def read_json(path: Path, type: type[T]) -> T | None:
    """The content of a file of a run folder; None if it does not exist or, with a warning, if it cannot be used."""
    return read_usable(path, lambda: msgspec.json.decode(read_regular(path), type=type))


def read_usable(path: AnyPath, read: Callable[[], T]) -> T | None:
    """Call ``read``, which reads ``path``; None if it does not exist or, with a warning, if it cannot be used."""
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        reason = str(error)
    warnings.warn(f"{path} cannot be used: {reason}", HpcJobsWarning, stacklevel=3)
    return None


def read_submitted(run_dir: Path) -> Entry | None:
    """``submitted.json``: the job of a run folder; None without the file or, with a warning, if it is damaged."""
    return read_usable(run_dir / SUBMITTED, lambda: require_submitted(run_dir))


def require_submitted(run_dir: Path) -> Entry:
    """``submitted.json``. Raises OSError: it cannot be read. ValueError, RecursionError: it is damaged."""
    return msgspec.json.decode(read_regular(run_dir / SUBMITTED), type=Entry)


def write_submitted(run_dir: Path, entry: Entry) -> None:
    """Write ``submitted.json``. Raises OSError."""
    write_beside(run_dir / SUBMITTED, msgspec.json.encode(entry))


def read_request(entry: Entry) -> RequestedJob | None:
    """The request; None without a manifest or, with a warning, if the manifest is damaged."""
    run_dir = Path(entry.run_dir)
    return read_usable(run_dir / MANIFEST, lambda: read_manifest(run_dir).request)


def own_ids(entry: Entry) -> list[str]:
    """The ids of the entry's tasks: ``123`` or ``123_0 123_1 ...``."""
    if entry.array is None:
        return [entry.job_id]
    if entry.task is not None:
        return [entry.named_id]
    return [f"{entry.job_id}_{index}" for index in array_indices(entry.array)]


def read_state(entry: Entry, job_id: str) -> StateFile | None:
    """The job's own state file; None before its script started."""
    path = _state_path(entry, job_id)
    return read_usable(path, lambda: read_state_file(path))


def _state_path(entry: Entry, job_id: str) -> str:
    # As text: `wait` and `ps` read many of these files, and a `Path` takes as long as the file.
    return os.path.join(entry.run_dir, job_id.partition("_")[2], STATE)


def find_started(entry: Entry, job_ids: Sequence[str]) -> Sequence[str]:
    """The ids of ``job_ids`` that may have written files: in a large array, the tasks with a folder.

    The run folder is listed once: an array can have 100,000 tasks.
    """
    if len(job_ids) < _FEW_TASKS:
        return job_ids
    try:
        folders = set(os.listdir(entry.run_dir))
    except FileNotFoundError:
        return ()
    except OSError:
        return job_ids  # reading them gives the reason
    return [job_id for job_id in job_ids if job_id.partition("_")[2] in folders]


def all_ended(entry: Entry) -> bool:
    """Every task of the entry has written its end itself."""
    states = (read_state(entry, job_id) for job_id in own_ids(entry))
    return all(state is not None and state.state.ended for state in states)


def own_record(entry: Entry, job_id: str) -> JobRecord | None:
    """The state file as a record; None before the script started."""
    state = read_state(entry, job_id)
    if state is None:
        return None
    elapsed = state.ended - state.started if state.ended is not None and state.started is not None else None
    return JobRecord(
        job_id=job_id,
        state=state.state,
        source="job",
        name=entry.name,
        node_list=state.nodes,
        submitted=entry.submitted,
        started=state.started,
        ended=state.ended,
        elapsed_s=elapsed,
        exit_code=state.exit_code,
        restarts=state.restarts,
    )


def own_records(entry: Entry) -> list[JobRecord]:
    """The state files of the entry's tasks, as far as they have started."""
    tasks = find_started(entry, own_ids(entry))
    return [record for record in (own_record(entry, task) for task in tasks) if record is not None]


def read_attempts(run_dir: Path) -> list[Attempt]:
    """The attempts, oldest first; none for a job without ``--retries``. Lines that cannot be read are left out."""
    try:
        return read_history(str(run_dir)).attempts
    except NotADirectoryError:
        return []
    except OSError as error:
        warnings.warn(f"{run_dir / ATTEMPTS} cannot be read: {error.strerror}", HpcJobsWarning, stacklevel=2)
        return []


def continuation(entry: Entry) -> Continuation:
    """The job that ``entry`` is now, and when it was submitted."""
    first = Continuation(entry.job_id, entry.submitted)
    if entry.array is not None:
        return first
    return ControlDir(entry.run_dir).continuation() or first


def write_continuation(entry: Entry, job: Continuation) -> None:
    """Record that ``job`` continues ``entry``; a folder that cannot be written gives a warning."""
    control = ControlDir(entry.run_dir)
    try:
        control.write_continued(job.job_id, job.submitted)
    except OSError as error:
        warnings.warn(
            f"{error.filename or control.path} cannot be written: {error.strerror}", HpcJobsWarning, stacklevel=2
        )


def current_id(entry: Entry) -> str:
    """The scheduler's id of the job that carries ``entry`` on."""
    return continuation(entry).job_id


CLOCK_TOLERANCE_S = 300.0
"""How far the clocks of login node, controller and node may differ, and how long a submission may be repeated for."""
FINAL_AFTER_S = 300.0
"""Seconds after the end of a job until its accounting record is final."""
FORGOTTEN_S = 30 * 86_400.0
"""A job that its scheduler does not know is not asked about any more after this long."""
_REQUEUE_S = 86_400.0
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.1


def read_accounting(entry: Entry) -> list[JobRecord] | None:
    """The records that were kept; None where there are none, or the job, or a task of it, has started again since."""
    records = read_ends(entry)
    return records if covers_tasks(entry, records) else None


def read_ends(entry: Entry) -> list[JobRecord]:
    """The kept records of those tasks that have not started again since."""
    path = Path(entry.run_dir) / ACCOUNTING
    records = read_json(path, list[JobRecord]) or []
    if not records:
        return []
    of_task: dict[str, list[JobRecord]] = {}
    for record in records:
        for task in set(tasks_of(record)):
            of_task.setdefault(task, []).append(record)
    again = {task for task in own_ids(entry) if _started_since(entry, task, path, of_task.get(task, []))}
    return [record for record in records if again.isdisjoint(tasks_of(record))]


def covers_tasks(entry: Entry, records: Iterable[JobRecord]) -> bool:
    """Whether there is a record of every task: the accounting of an array arrives task by task."""
    there = {task for record in records for task in tasks_of(record)}
    return bool(there) and (entry.job_id in there or there.issuperset(own_ids(entry)))


def tasks_of(record: JobRecord) -> tuple[str, ...]:
    """The ids of the record's tasks, and its own; of a component (``12+1``) also that of its job."""
    of_job = (parent_id(record.job_id),) if "+" in record.job_id else ()
    return (*task_ids(record.job_id), record.job_id, *of_job)


def _started_since(entry: Entry, task: str, path: Path, own: list[JobRecord]) -> bool:
    """Whether the task wrote after ``path``, and not the end in its records there: it was requeued by hand.

    The times are the file server's, which makes them comparable.
    """
    try:
        if os.stat(_state_path(entry, task)).st_mtime <= os.stat(path).st_mtime:
            return False
    except OSError:
        return False
    state = read_state(entry, task)
    if state is None:
        return False
    if any(record.restarts is not None and state.restarts > record.restarts for record in own):
        return True
    if any(record.source == "nobody" for record in own):
        return True  # it was cancelled while it waited
    ends = [record.ended for record in own if record.ended is not None]
    if state.started is not None and any(state.started < end for end in ends):
        return False  # it began before that end: its node was given up, and it went on there
    return state.ended is None or not any(abs(state.ended - end) <= CLOCK_TOLERANCE_S for end in ends)


def may_be_requeued(entry: Entry, records: Sequence[JobRecord]) -> bool:
    """Slurm may still know the job, which `scontrol requeue` would start again, or hpcjobs has requeued it."""
    ends = [record.ended for record in records if record.ended is not None]
    if not ends or not entry.kind.may_requeue:
        return False
    ago_s = time.time() - max(ends)
    return ago_s < _REQUEUE_S or (ago_s < FORGOTTEN_S and _was_requeued(entry, records))


def _was_requeued(entry: Entry, records: Iterable[JobRecord]) -> bool:
    """Whether one of these ends was the last as hpcjobs requeued the job."""
    requeued, ends = _read_requeued(entry), ends_by_task(records)
    return any(abs(requeued[task] - ends[task]) <= CLOCK_TOLERANCE_S for task in requeued.keys() & ends.keys())


def ends_by_task(records: Iterable[JobRecord]) -> dict[str, float]:
    return {task: record.ended for record in records if record.ended is not None for task in tasks_of(record)}


def _read_requeued(entry: Entry) -> dict[str, float]:
    return read_json(Path(entry.run_dir) / REQUEUED, dict[str, float]) or {}


def note_requeue(entry: Entry, ends: dict[str, float], *, refused: bool = False) -> None:
    """Note that the job is requeued after these ends, by task, or that Slurm refused it.

    It is asked for then until it has another end, or Slurm has forgotten it.
    """
    if not ends:
        return
    path = Path(entry.run_dir) / REQUEUED
    try:
        with _lock_ends(entry):
            others = {task: end for task, end in _read_requeued(entry).items() if task not in ends}
            write_beside(path, msgspec.json.encode(others if refused else others | ends))
    except (FileNotFoundError, NotADirectoryError):
        pass  # its run folder was removed, or it has none
    except OSError as error:
        warnings.warn(f"{path} cannot be written: {error.strerror}", HpcJobsWarning, stacklevel=2)


def are_final(entry: Entry, records: Iterable[JobRecord]) -> bool:
    """Whether the records are final: they agree with the job's own state, or they are old enough.

    In the first moments after a short job's end the accounting may lack its name, or have the end before.
    """
    return all(_is_final(read_state(entry, task), record) for record in records for task in task_ids(record.job_id))


def _is_final(state: StateFile | None, record: JobRecord) -> bool:
    if record.ended is None:
        return True
    if state is not None and state.started is not None and state.started > record.ended + CLOCK_TOLERANCE_S:
        return False
    if record.source == "scontrol":  # slurmctld itself is never late, and soon forgets the job
        return True
    written_end = None if state is None else state.ended
    in_step = (
        record.name is not None and written_end is not None and abs(written_end - record.ended) <= CLOCK_TOLERANCE_S
    )
    return in_step or time.time() - record.ended >= FINAL_AFTER_S


def keep_accounting(entry: Entry, records: list[JobRecord]) -> None:
    """Keep the records of every task in the run folder, if that is still there and ours to write.

    An entry that names one task knows nothing of the others, and keeps none.
    """
    folder = Path(entry.run_dir)
    if entry.task is not None or not os.path.isdir(folder):
        return
    # Which start of the job they are about: sacct does not print it.
    states = {record.job_id: read_state(entry, record.job_id) for record in records if record.restarts is None}
    with_starts = [
        record if (state := states.get(record.job_id)) is None else replace(record, restarts=state.restarts)
        for record in records
    ]
    try:
        write_beside(folder / ACCOUNTING, msgspec.json.encode(with_starts))
    except OSError as error:
        warnings.warn(f"{folder / ACCOUNTING} cannot be written: {error.strerror}", HpcJobsWarning, stacklevel=2)


def keep_ends(entry: Entry, ends: list[JobRecord]) -> None:
    """Keep the records of some tasks beside those that were kept of the others."""
    if ends:
        job = replace(entry, task=None)  # an entry that names one task; the file has those of all
        there = {task for record in ends for task in tasks_of(record)}
        with _lock_ends(entry):
            keep_accounting(job, [*(record for record in read_ends(job) if there.isdisjoint(tasks_of(record))), *ends])


def drop_ends(entry: Entry, ends: list[JobRecord], alive: Iterable[JobRecord]) -> list[JobRecord]:
    """Forget those of the kept records ``ends`` whose tasks are in the queue again; return the others."""
    again = {task for record in alive for task in tasks_of(record)}
    rest = [record for record in ends if again.isdisjoint(tasks_of(record))]
    if len(rest) < len(ends):
        # An entry that names one task has the kept end of that task alone, and the file has those of all.
        job = replace(entry, task=None)
        with _lock_ends(entry):
            others = [record for record in read_ends(job) if again.isdisjoint(tasks_of(record))]
            if others:
                keep_accounting(job, others)
            else:
                with contextlib.suppress(OSError):
                    (Path(entry.run_dir) / ACCOUNTING).unlink()
    return rest


@contextlib.contextmanager
def _lock_ends(entry: Entry) -> Iterator[None]:
    """Within the block no other command changes the kept ends; without a lock where there is none within seconds."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(os.path.join(entry.run_dir, SUBMITTED), flags)
            stack.callback(os.close, descriptor)
            for _ in range(_LOCK_TRIES):  # who holds it may be stopped, on any host
                with contextlib.suppress(BlockingIOError):
                    lock_file(descriptor, wait=False)
                    break
                time.sleep(_LOCK_PAUSE_S)
        yield


def is_closed(entry: Entry) -> bool:
    """Whether the job needs no further query: its last end is kept, or its run folder was removed."""
    if read_accounting(entry) is not None:
        return True
    try:
        os.lstat(entry.run_dir)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # not there at the moment
    return False


_BLOCK = 1 << 16
_LONGEST_BYTES = 1 << 22
"""A longer line is given out in pieces: a progress bar may write gigabytes without the end of a line."""
_FIRST_OF_SEVERAL = 0xC0
"""Bytes from here on begin a character of several bytes in UTF-8."""
_TIME = re.compile(
    rb"(?<!\d)(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,]\d+)?(?P<zone>Z|[+-]\d\d:?\d\d)?(?!\d)"
)
_WITHOUT_TIME_BYTES = 1 << 30
"""A search for a time ends where so much of a file has none."""
_TIME_BYTES = 120
"""A time that stands later in a line is not the moment the line was printed."""


class Tail:
    """A file that grows, or is not there yet. It is open only while it is read: an array has many."""

    def __init__(self, path: Path, *, start: int = 0) -> None:
        self._path, self._read_bytes = path, start
        self._seen_bytes = start
        """The file's size at the last look, when the incomplete last line was read."""
        self._is_within_line = False
        """Whether a piece of an incomplete line was returned."""

    def news(self, *, last: bool) -> Iterator[str]:
        """New lines, read block by block; with ``last``, an incomplete last line too.

        Pieces of a line that is too long to hold have no newline at their end, except the last one.
        """
        try:
            size = self._path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return
        if size < self._read_bytes:  # the file was replaced
            self._read_bytes, self._is_within_line = 0, False
        if size == self._seen_bytes and not last:
            return
        begun: list[bytes] = []  # pieces of an incomplete line
        if size > self._read_bytes:
            with open_regular(self._path) as file:
                file.seek(self._read_bytes)
                while block := file.read(_BLOCK):
                    *ends, rest = block.split(b"\n")
                    for end in ends:
                        line, begun = b"".join([*begun, end]), []
                        self._read_bytes += len(line) + 1
                        self._is_within_line = False
                        yield line.decode("utf-8", "replace") + "\n"
                    begun.append(rest)
                    if sum(map(len, begun)) >= _LONGEST_BYTES:
                        piece = b"".join(begun)
                        end_of_piece = len(piece) - next((n for n in (1, 2, 3) if piece[-n] >= _FIRST_OF_SEVERAL), 0)
                        begun = [piece[end_of_piece:]]  # a character of several bytes stays together
                        self._read_bytes += end_of_piece
                        self._is_within_line = True
                        yield piece[:end_of_piece].decode("utf-8", "replace")
        self._seen_bytes = size
        if last and (any(begun) or self._is_within_line):
            line = b"".join(begun)
            self._read_bytes += len(line)
            self._is_within_line = False
            yield line.decode("utf-8", "replace") + "\n"


def find_start(
    path: Path, *, count: int | None = None, since: float | None = None, accepts: Callable[[str], bool]
) -> int:
    """The offset of the last ``count`` lines that ``accepts`` takes, behind the last line that is older than ``since``.

    The file is read from its end, only as far as needed.

    Raises ValueError: the file, or 1 GiB of it, has no time to compare with ``since``. OSError: it cannot be read.
    """
    start, accepted, dated = path.stat().st_size, 0, None
    if count == 0 or (since is not None and path.stat().st_mtime < since):
        return start
    end = above = start
    for offset, line in _lines_from_end(path):
        if since is not None and (moment := line_time(line)) is not None:
            dated = offset
            if moment < since:
                return above if count is None else start
        elif since is not None and (end if dated is None else dated) - offset > _WITHOUT_TIME_BYTES:
            raise ValueError(f"no line in {_WITHOUT_TIME_BYTES >> 30} GiB of {path} has a date and a time")
        above = offset
        if count is not None and accepts(line.decode("utf-8", "replace")):
            start, accepted = offset, accepted + 1
            if accepted == count:
                return start
    if since is not None and dated is None and path.stat().st_size:
        raise ValueError(f"no line of {path} has a date and a time")
    return 0 if count is None else start


def line_time(line: bytes) -> float | None:
    """The moment that a line begins with, in seconds since 1970; local time where no zone stands. None: none."""
    match = _TIME.search(line[:_TIME_BYTES])
    if match is None:
        return None
    numbers = [int(part) for part in match.groups()[:6]]
    zone = (match["zone"] or b"").decode()
    try:
        if not zone:
            return datetime(*numbers).timestamp()  # type: ignore[arg-type]  # six numbers
        text = "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}".format(*numbers)
        offset = "+0000" if zone == "Z" else zone.replace(":", "")
        return datetime.strptime(text + offset, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):  # the 31st of February, or the year 0
        return None


def _lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with its offset, the last one first; one block and one line, or a piece of it, are in memory."""
    with open_regular(path) as file:
        position = file.seek(0, os.SEEK_END)
        if not position:
            return
        rest: list[bytes] = []  # pieces of an incomplete line, the last piece first
        ends_line = True
        while position:
            size = min(_BLOCK, position)
            position -= size
            file.seek(position)
            block = file.read(size)
            end = len(block)
            if ends_line and block.endswith(b"\n"):
                end -= 1
            ends_line = False
            while (newline := block.rfind(b"\n", 0, end)) >= 0:
                yield position + newline + 1, block[newline + 1 : end] + b"".join(reversed(rest))
                rest, end = [], newline
            rest.append(block[:end])
            if sum(map(len, rest)) >= _LONGEST_BYTES:
                yield position, b"".join(reversed(rest))
                rest = []
        if rest:
            yield 0, b"".join(reversed(rest))


_END_BYTES = 1 << 16


def first_line(path: Path) -> bytes:
    """The first line of a file; empty where it is not there."""
    try:
        with open_regular(path) as file:
            return file.readline(_END_BYTES)
    except OSError:  # removed in the meantime
        return b""


def last_lines(path: Path) -> list[bytes]:
    """The lines of the last 64 KiB; the first of them may be the end of one."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _END_BYTES))
            return file.read().splitlines()
    except OSError:  # not there yet
        return []


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
