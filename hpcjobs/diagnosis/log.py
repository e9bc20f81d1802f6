"""Reads logs: which rank printed a line, and which rank failed first according to launchers."""

from __future__ import annotations

import re
import signal
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcjobs.diagnosis.values import Failure, LogLine
from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import open_regular
from hpcjobs.record.values import read_count
from hpcjobs.units import index_ranges

READ_BYTES = 8 << 20
READ_LINES = 50_000
"""So much of the end of a log is read: failures are at the end."""
_COUNTED_BYTES = 1 << 30
"""So much before it is read to count its lines."""
_BLOCK = 1 << 20

# How launchers name the rank of a line: hpcjobs and `srun --label`, torch, horovodrun and `mpirun --tag-output`.
_LABELS = (
    re.compile(r" *0*(?P<rank>\d{1,6}):(?!\d\d\b) ?(?P<text>.*)"),  # `12:30:45` is a time of day
    re.compile(r"\[rank(?P<rank>\d{1,6})\]: ?(?P<text>.*)"),
    re.compile(r"\[(?:\d+,)?(?P<rank>\d{1,6})\]<std(?:err|out)>: ?(?P<text>.*)"),
)
TRACEBACK = "Traceback (most recent call last)"
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_HOST = re.compile(r"(?P<host>[\w.-]+):\d+:\d+ \[\d+\] (?:\S+ )?NCCL |\[(?P<host2>[\w.-]+):\d+\] \*\*\* ")
_GROUP_MARGIN = re.compile(r"(?:  )+[|+] (?! *[-+])")
"""How Python draws the exceptions of an ExceptionGroup."""
_SRUN = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<tasks>\d+(?:[,-]\d+)*): (?P<how>Exited with exit code (?P<code>\d+)|"
    r"Segmentation fault|Bus error|Aborted|Killed|Illegal instruction|Floating point exception|Out Of Memory)"
)
_SRUN_TASKS = re.compile(r"srun: error: [\w.-]+: tasks? (?P<tasks>\d+(?:[,-]\d+)*): ")
_SIGNALS = {
    "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Killed": 9, "Illegal instruction": 4,
    "Floating point exception": 8,
}  # fmt: skip
_SHELL = re.compile(r"\S+: line \d+: +\d+ (?P<how>[A-Z][a-z]+(?: [a-z]+)*)(?: {2,}| *\()")
_BARE = re.compile(
    r"(?:make(?:\[\d+\])?: \*\*\* \[[^]]*\] )?"
    r"(?P<how>Segmentation fault|Bus error|Aborted|Killed|Illegal instruction|Floating point exception)"
    r"(?: +\(core dumped\))?\.?|Command terminated by signal (?P<number>\d+)"
)
"""A line of a shell (dash, or bash -c), make or `time` that names the signal alone."""
_LINES_BEHIND = 10
"""Lines behind a shell's report that show that its script went on for long."""
_RUNTIME = re.compile(
    r"Fatal Python error: (?P<how>[A-Z][a-z]+(?: [a-z]+)?)|(?:forrtl: severe \(\d+\)|Program received signal).*?"
    r"(?P<name>SIG(?:SEGV|BUS|ILL|FPE|ABRT))"
)
"""Lines that the runtimes of Python and Fortran print when a signal ends them."""
_FORTRAN_CRASH = 174
"""The exit code of Intel's Fortran where a signal ends the program."""
_HPCJOBS = re.compile(r"hpcjobs: first failure: rank (?P<rank>\d+) on (?P<host>\S+), exit code (?P<code>\d+)")
_MPIRUN = re.compile(
    r"mpirun noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on "
    r"signal (?P<signal>\d+)"
)
_DEEPSPEED = re.compile(r"sigkill_handler\].* exits with return code = (?P<code>-?\d+)")
_MPI_PLACE = re.compile(r"=\s+(?:RANK (?P<rank>\d+) )?PID \d+ RUNNING AT (?P<host>\S+)")
_MPI_END = re.compile(r"=\s+(?:KILLED BY SIGNAL: (?P<signal>\d+)|EXIT CODE: (?P<code>\d+)|EXIT STATUS: (?P<code2>\d+))")
_MPI_NAME = re.compile(r"\s+Process name: \[\S+,(?P<rank>\d+)\]")
_MPI_CODE = re.compile(r"\s+Exit code: +(?P<code>\d+)")
_MPI_LINES = 6
"""Largest number of lines of mpirun's tables."""
_TORCHRUN = re.compile(r"torch[./]distributed[./](?:elastic|run|launch)")
_TORCHRUN_FIELDS = re.compile(r"^\s*(?P<key>host|rank|exitcode)\s*:\s*(?P<value>[\w.-]+)")


def read_lines(path: Path) -> list[LogLine]:
    """The lines of the end of a log, with their numbers in the file, or, with a warning, those in what is read of it.

    Raises OSError: it cannot be read.
    """
    with open_regular(path) as file:
        skipped = max(0, file.seek(0, 2) - READ_BYTES)
        number, left = 1, skipped if skipped <= _COUNTED_BYTES else 0
        if left < skipped:
            text = f"{path} is larger than {_COUNTED_BYTES >> 30} GiB: only its last {READ_BYTES >> 20} MiB are read"
            warnings.warn(f"{text}, and line numbers count from there", HpcJobsWarning, stacklevel=2)
        file.seek(skipped - left)
        while left:
            block = file.read(min(_BLOCK, left))
            number, left = number + block.count(b"\n"), left - len(block)
        text = file.read().decode("utf-8", "replace")
    lines = text.split("\n")
    if skipped:  # the first one is the rest of a line
        lines, number = lines[1:], number + 1
    number, lines = number + max(0, len(lines) - READ_LINES), lines[-READ_LINES:]
    return [parse_line(line.rstrip("\r"), str(path), number + n) for n, line in enumerate(lines) if line.strip()]


def last_lines(path: Path, rank: int | None, count: int) -> list[str]:
    """The last lines of a rank, or of all ranks if the log does not label them.

    Raises OSError: it cannot be read.
    """
    return select_last(read_lines(path), rank, count)


def select_last(lines: Sequence[LogLine], rank: int | None, count: int) -> list[str]:
    """The last ``count`` lines of ``rank``, or of all ranks if no line has its label."""
    own = [line.text for line in lines if line.rank == rank] if rank is not None else []
    return (own or [line.text for line in lines])[-count:]


def parse_line(line: str, file: str, number: int) -> LogLine:
    """Remove the label of the rank, colours, control characters, and all but the last state of a progress bar."""
    rank: int | None = None
    text = _CONTROL.sub("", _COLOUR.sub("", line))
    for label in _LABELS:  # one inside another: srun's before torch's
        if match := label.match(text):
            rank, text = int(match["rank"]) if rank is None else rank, match["text"]
    text = text.rpartition("\r")[2]
    if margin := _GROUP_MARGIN.match(text):
        text = text[margin.end() :]
    host = _HOST.match(text)
    return LogLine(file, number, text, rank, (host["host"] or host["host2"]) if host else None)


def find_first_failure(lines: Iterable[LogLine], *, tasks_are_ranks: bool = True) -> Failure | None:
    """The first failure that a launcher reports: hpcjobs, torchrun's root cause, srun's first task, mpirun."""
    all_lines = list(lines)
    for line in all_lines:
        if match := _HPCJOBS.search(line.text):
            return Failure(_where(line), _number(match["rank"]), match["host"], _number(match["code"]))
    if (failure := _torchrun_root_cause(all_lines)) is not None:
        return failure
    for line in all_lines:
        if match := _SRUN.search(line.text):
            task = _first_task(match["tasks"]) if tasks_are_ranks else None
            code = _number(match["code"])
            crash = _killed_at_the_end(all_lines) if code == _FORTRAN_CRASH else None
            signal_number = crash.signal if crash else _SIGNALS.get(match["how"])
            return Failure(_where(line), task, match["host"], code, signal_number)
        if match := _MPIRUN.search(line.text):
            return Failure(_where(line), _number(match["rank"]), match["host"], None, _number(match["signal"]))
    return _mpi_table(all_lines) or _killed_at_the_end(all_lines) or _deepspeed_end(all_lines)


def has_other_ranks(lines: Sequence[LogLine]) -> bool:
    """Whether a task of srun is not one rank: torchrun is named, or srun reports no task of a rank that failed."""
    own = (line.rank for line in lines if TRACEBACK in line.text or _RUNTIME.match(line.text))
    failed = sorted({rank for rank in own if rank is not None})
    reports = [match for line in lines if (match := _SRUN_TASKS.search(line.text))]
    reported = [tasks for match in reports for tasks in _tasks(match["tasks"])]
    is_disjoint = bool(failed and reported) and not any(_has_one_of(tasks, failed) for tasks in reported)
    return is_disjoint or any(_TORCHRUN.search(line.text) for line in lines)


def _mpi_table(lines: Sequence[LogLine]) -> Failure | None:
    """The first failed process, by the table of mpirun (Intel MPI, MPICH, Open MPI)."""
    for n, line in enumerate(lines):
        place = _MPI_PLACE.match(line.text) or _MPI_NAME.match(line.text)
        if place is None:
            continue
        values = place.groupdict()
        near = [each.text for each in lines[n : n + _MPI_LINES]]
        end = next(filter(None, (_MPI_END.match(text) or _MPI_CODE.match(text) for text in near)), None)
        ends = end.groupdict() if end else {}
        return Failure(
            _where(line),
            _number(values["rank"]),
            values.get("host"),
            _number(ends.get("code") or ends.get("code2")),
            _number(ends.get("signal")),
        )
    return None


def _deepspeed_end(lines: Sequence[LogLine]) -> Failure | None:
    for line in lines:
        if match := _DEEPSPEED.search(line.text):
            return Failure(_where(line), None, None, *_code_or_signal(match["code"]))
    return None


def find_end(lines: Iterable[LogLine], rank: int) -> Failure | None:
    """How a rank ended, by srun's report."""
    for line in lines:
        if (match := _SRUN.search(line.text)) and any(rank in tasks for tasks in _tasks(match["tasks"])):
            return Failure(_where(line), rank, match["host"], _number(match["code"]), _SIGNALS.get(match["how"]))
    return None


def find_memory_kills(lines: Iterable[LogLine]) -> list[Failure]:
    """What srun reports as out of memory, each line with its first task; without such lines, the killed tasks."""
    reports = [(line, match) for line in lines if (match := _SRUN.search(line.text))]
    for how in ("Out Of Memory", "Killed"):
        if ended := [
            Failure(_where(line), _first_task(match["tasks"]), match["host"], None, int(signal.SIGKILL))
            for line, match in reports
            if match["how"] == how
        ]:
            return ended
    return []


def signal_reported_by_shell(text: str) -> int | None:
    """The signal that a shell names as the end of a program."""
    if (bare := _BARE.fullmatch(text.strip())) is not None:
        return _number(bare["number"]) if bare["number"] else _SIGNALS[bare["how"]]
    match = _SHELL.match(text)
    return _SIGNALS.get(match["how"]) if match else None


def find_crash_report(lines: Iterable[LogLine], rank: int | None, number: int) -> LogLine | None:
    """The first line of a language's runtime that reports signal ``number`` as the end of a rank."""
    own = (line for line in lines if rank is None or line.rank in (None, rank))
    return next((line for line in own if _signal_reported_by_runtime(line.text) == number), None)


def _signal_reported_by_runtime(text: str) -> int | None:
    match = _RUNTIME.match(text)
    if match is None:
        return None
    return int(signal.Signals[match["name"]]) if match["name"] else _SIGNALS.get(match["how"])


def _killed_at_the_end(lines: Sequence[LogLine]) -> Failure | None:
    """The signal that the shell or a program's runtime reports, if no exception follows."""
    for behind, line in enumerate(reversed(lines)):
        if TRACEBACK in line.text:
            return None
        number = signal_reported_by_shell(line.text) if behind < _LINES_BEHIND else None
        number = number or _signal_reported_by_runtime(line.text)
        if number is not None:
            return Failure(_where(line), line.rank, None, None, number)
    return None


def find_host(lines: Iterable[LogLine], rank: int) -> str | None:
    """The host of a task, from srun's report of its end."""
    for line in lines:
        if (match := _SRUN.search(line.text)) and any(rank in tasks for tasks in _tasks(match["tasks"])):
            return match["host"]
    return None


def _tasks(text: str) -> list[range]:
    """The ranges of ``0-3,7``, never expanded: a program may print any; none if they cannot be tasks."""
    try:
        return index_ranges(text)
    except ValueError:
        return []


def _first_task(text: str) -> int | None:
    return min((tasks.start for tasks in _tasks(text)), default=None)


def _has_one_of(tasks: range, ranks: Sequence[int]) -> bool:
    """Whether one of the ``ranks``, which are in order, is one of these tasks."""
    at = bisect_left(ranks, tasks.start)
    return at < len(ranks) and ranks[at] in tasks


def _number(text: str | None) -> int | None:
    """A rank, an exit code or a signal; None: there is none, or it cannot be one."""
    return read_count(text or "", digits=10)


def _code_or_signal(text: str) -> tuple[int | None, int | None]:
    """The exit code, or the signal, which launchers of Python print as a negative code."""
    return (None, _number(text[1:])) if text.startswith("-") else (_number(text), None)


def _torchrun_root_cause(lines: list[LogLine]) -> Failure | None:
    """The block below ``Root Cause (first observed failure)``."""
    start = next((n for n, line in enumerate(lines) if "Root Cause (first observed failure)" in line.text), None)
    if start is None:
        return None
    matches = [match for line in lines[start + 1 : start + 9] if (match := _TORCHRUN_FIELDS.match(line.text))]
    fields = {match["key"]: match["value"] for match in matches}
    rank = _number(fields.get("rank"))
    if rank is None:
        return None
    return Failure(_where(lines[start]), rank, fields.get("host"), *_code_or_signal(fields.get("exitcode", "")))


def _where(line: LogLine) -> str:
    return f"{Path(line.file).name}, line {line.number}"
