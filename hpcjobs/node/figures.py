"""Follows the log of a job: matching lines become rows of metrics.jsonl, the figures go to summary.json at the end.

The log is the file behind standard output. To end the reader, the job's script writes the program's exit code to the
file `END` and sends SIGHUP; other signals are for the program. The cost is bounded: the reader reads at most `CHUNK`
bytes each second, the newest ones if the log grows faster, and writes fewer rows the more there are.
"""

import io
import json
import os
import re
import signal
import stat
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence

from hpcjobs.files import write_beside
from hpcjobs.processes.fork import SignalPipe
from hpcjobs.record import METRICS, SUMMARY
from hpcjobs.record.figures import LOG_SOURCE, FigureReader, FigureRule, split_lines

END = ".exit_code"
CHUNK = 4 << 20
INTERVAL_S = 1.0
READ_CPU_S = 0.5
"""CPU time for the lines of one read."""
_NEWEST = 20
ROWS_PER_READ = 20
"""Rows of a figure from one read, the newest ones; all values count for the results."""
ROWS = 10000
"""After this number, a figure gets at most one row a second, and half as many after each further `ROWS`."""
_OWN = "/proc/self/fd/1"
_LABELS_FROM = 2


def follow(run_dir: str, rules: Sequence[FigureRule], *, name: str, world_size: int, begin: int) -> int:
    """Read until `END` is there, or the job's script is gone; the exit code, 1 if the log cannot be read."""
    try:
        with open(_OWN, "rb") as log:
            if stat.S_ISREG(os.fstat(log.fileno()).st_mode):
                return _follow(log, run_dir, rules, name=name, world_size=world_size, begin=begin)
            return _fail("the output of the job is no file")
    except OSError as error:
        return _fail(f"{error.filename} cannot be used: {error.strerror}")


def _follow(
    log: io.BufferedReader, run_dir: str, rules: Sequence[FigureRule], *, name: str, world_size: int, begin: int
) -> int:
    signals = SignalPipe(signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
    parent = os.getppid()
    readers = [reader for reader in map(_make_reader, rules) if reader is not None]
    rows = _Rows(os.path.join(run_dir, METRICS), name=name, world_size=world_size)
    summary = _Summary(run_dir, name=name, world_size=world_size)
    tail = _Tail(log, begin)
    ended = False
    while not ended:
        # Before the wait: a SIGHUP that came before this process listened is lost.
        ended = os.path.exists(os.path.join(run_dir, END)) or os.getppid() != parent or parent == 1
        if not ended:
            signals.wait(INTERVAL_S)
        for line in _within_cpu_time(tail.read(last=ended), tail):
            for reader in readers:
                value = reader.read(line, labelled=world_size >= _LABELS_FROM)
                if value is not None:
                    rows.add(reader, value)
        rows.write()
    summary.write(readers, _exit_code(run_dir), skipped=tail.skipped)
    for reader in readers:
        _report(reader)
    if tail.skipped:
        print(f"hpcjobs: {tail.skipped:,} bytes of the log were not read: it grew too fast", file=sys.stderr)
    return 0


def _within_cpu_time(lines: List[str], tail: "_Tail") -> Iterator[str]:
    """The lines, and after `READ_CPU_S` only the newest, where a pattern takes long for each."""
    began, is_late = time.process_time(), False
    for number, line in enumerate(lines):
        if number % _NEWEST == 0:
            is_late = time.process_time() - began > READ_CPU_S
        if is_late and number < len(lines) - _NEWEST:
            tail.skipped += len(line)
        else:
            yield line


def _make_reader(rule: FigureRule) -> Optional[FigureReader]:
    try:
        return FigureReader(rule)
    except (re.error, RecursionError, OverflowError) as error:
        _fail(f"figure {rule.name}: this Python ({sys.version[:6]}) cannot read its pattern: {error}")
        return None


def _fail(problem: str) -> int:
    print(f"hpcjobs: no figures: {problem}", file=sys.stderr)
    return 1


def _report(reader: FigureReader) -> None:
    name = reader.rule.name
    if reader.is_given_up:
        print(f"hpcjobs: figure {name}: its pattern takes too long and was given up", file=sys.stderr)
    if reader.unreadable:
        hint = ": a comma stands between thousands; LC_ALL=C may help" if "," in reader.unreadable else ""
        print(f"hpcjobs: figure {name}: {reader.unreadable!r} is no number{hint}", file=sys.stderr)
    if reader.other_unit:
        print(f"hpcjobs: figure {name}: values in {reader.other_unit} do not count beside those in {reader.unit}",
              file=sys.stderr)  # fmt: skip
    if reader.values.last is None and not reader.unreadable:
        print(f"hpcjobs: figure {name}: no line of the log has it", file=sys.stderr)


def _exit_code(run_dir: str) -> Optional[int]:
    """As the job's script wrote it; None: the script was killed."""
    path = os.path.join(run_dir, END)
    try:
        with open(path) as file:
            text = file.read().strip()
        os.unlink(path)
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class _Tail:
    """The log from ``begin`` on, in complete lines."""

    def __init__(self, log: io.BufferedReader, begin: int) -> None:
        self._log, self._position, self._rest = log, begin, b""
        self.skipped = 0

    def read(self, *, last: bool) -> List[str]:
        """The lines that are new; with ``last`` also one that does not end."""
        size = os.fstat(self._log.fileno()).st_size
        if size < self._position:  # truncated
            self._position, self._rest = 0, b""
        if size - self._position > CHUNK:
            self.skipped += size - CHUNK - self._position
            self._position, self._rest = size - CHUNK, b""
        self._log.seek(self._position)
        new = self._log.read(CHUNK)
        self._position += len(new)
        text = self._rest + new
        if last:
            return split_lines(text)
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[end:][-CHUNK:]
        return split_lines(text[:end])


class _Rows:
    """Appends rows of kind ``figure`` to metrics.jsonl, each with one write."""

    def __init__(self, path: str, *, name: str, world_size: int) -> None:
        self._path, self._began = path, time.time()
        self._head = {"kind": "run", "time_s": 0.0, "schema": "hpcjobs.metrics/1", "workload": name,
                      "world_size": world_size, "total_steps": None, "source": LOG_SOURCE}  # fmt: skip
        self._head_is_written = False
        self._pending = {}  # type: Dict[str, List[Dict[str, Any]]]
        self._written = {}  # type: Dict[str, int]
        self._next_at = {}  # type: Dict[str, float]

    def add(self, reader: FigureReader, value: float) -> None:
        rule = reader.rule
        row = {"kind": "figure", "time_s": round(time.time() - self._began, 3), "name": rule.name, "value": value,
               "unit": reader.unit, "count": reader.values.count}  # fmt: skip
        rows = self._pending.setdefault(rule.name, [])
        rows.append(row)
        del rows[:-ROWS_PER_READ]

    def write(self) -> None:
        """Write the pending rows; rows that cannot be written are lost."""
        now, lines = time.time(), []  # type: float, List[Dict[str, Any]]
        for name, rows in self._pending.items():
            written = self._written.get(name, 0)
            if written >= ROWS:
                if now < self._next_at.get(name, 0.0):
                    continue
                rows = rows[-1:]
                self._next_at[name] = now + 2.0 ** (written // ROWS - 1)
            self._written[name] = written + len(rows)
            lines += rows
        self._pending = {}
        if not lines:
            return
        try:
            with io.FileIO(self._path, "a") as file:
                if not self._head_is_written and _is_own(self._path):
                    lines.insert(0, self._head)
                self._head_is_written = True
                file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        except OSError as error:
            print(f"hpcjobs: rows of {self._path} are lost: {error.strerror}", file=sys.stderr)


def _is_own(path: str) -> bool:
    """Whether no program writes this metrics.jsonl: it is empty, or a reader began it."""
    with open(path, "rb") as file:
        first = file.readline(4096)
    return not first or f'"source": "{LOG_SOURCE}"'.encode() in first


class _Summary:
    """Writes summary.json: adds ``figures`` to the program's file, or makes a file of the figures alone."""

    def __init__(self, run_dir: str, *, name: str, world_size: int) -> None:
        self._path = os.path.join(run_dir, SUMMARY)
        self._began = time.time()
        self._own = {
            "schema": "hpcjobs.summary/1",
            "source": LOG_SOURCE,
            "trainer": name,
            "strategy": name,
            "workload": name,
            "world_size": world_size,
            "job_id": os.environ.get("HPCJOBS_JOB_ID"),
        }
        if self._read().get("source") == LOG_SOURCE:  # of an earlier attempt
            os.unlink(self._path)

    def _read(self) -> Dict[str, Any]:
        try:
            with open(self._path, "rb") as file:
                summary = json.loads(file.read().decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def write(self, readers: Sequence[FigureReader], code: Optional[int], *, skipped: int) -> None:
        """Nothing where no figure was read."""
        results = {reader.rule.name: reader.result() for reader in readers}
        figures = {name: result._asdict() for name, result in results.items() if result is not None}
        if not figures:
            return
        summary = self._read()
        if not summary:
            now = time.time()
            summary = dict(self._own, status="completed" if code == 0 else "failed", exit_code=code,
                           started_at=_format_utc(self._began), ended_at=_format_utc(now),
                           elapsed_s=round(now - self._began, 3))  # fmt: skip
        summary["figures"] = figures
        if skipped:
            summary["log_bytes_not_read"] = skipped
        try:
            write_beside(self._path, json.dumps(summary, indent=1) + "\n", mode=None)
        except OSError as error:
            print(f"hpcjobs: {self._path} cannot be written: {error.strerror}", file=sys.stderr)


def _format_utc(time_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time_s))


def main() -> int:
    """``python figures.pyz NAME WORLD_SIZE RULES BEGIN RUN_DIR``: reads standard output from byte BEGIN on."""
    if len(sys.argv) != 6:
        sys.exit("usage: python figures.pyz NAME WORLD_SIZE RULES BEGIN RUN_DIR")
    name, world_size, rules, begin, run_dir = sys.argv[1:]
    return follow(run_dir, [FigureRule(**rule) for rule in json.loads(rules)], name=name, world_size=int(world_size),
                  begin=int(begin))  # fmt: skip
