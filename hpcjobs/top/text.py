"""Rows as text: the columns for a given width, bars, sparklines, and the description of the chosen job. Pure."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hpcjobs.diagnosis.reasons import explain_reason
from hpcjobs.printable import printable_line
from hpcjobs.run.progress import NodeSample
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.top.rows import JobRow, Snapshot, count_states
from hpcjobs.units import clock, count_tasks, human_bytes, human_duration

_SPARKS = "▁▂▃▄▅▆▇█"
_GAP = 1
"""Characters between two columns."""


Text = Callable[[JobRow, float], str]
"""A row as text at a moment."""


class Column(NamedTuple):
    """A column of the job table, in ``hpcjobs ps`` and on the screen of ``hpcjobs top``."""

    title: str
    json: str = ""
    """Its field of ``hpcjobs ps --json``; empty: it is computed."""
    ps: Text | None = None
    """None: only the screen has it."""
    blank: str = "-"
    """In ``ps``, for an unknown value."""
    drop: int = 0
    """A narrow ``ps`` omits columns in this order; 0: never."""
    top: Text | None = None
    """None: only ``ps`` has it."""
    width: int = 0
    """Most characters on the screen."""
    rank: int = 0
    """The screen has room for the lowest ranks first."""
    right: bool = False
    short: Text | None = None
    """Text without bar or sparkline, for a narrow screen."""

    def text(self, row: JobRow, now: float) -> str:
        """Return the text of ``row`` on the screen."""
        return "" if self.top is None else self.top(row, now)


def bar(share: float, width: int) -> str:
    """``share`` (0 to 1) as a bar of ``width`` characters."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` as at most ``width`` characters, each the mean of its part; a constant is a line in the middle."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _SPARKS[3] * count
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in means)


def cut(text: str, width: int) -> str:
    """``text`` as one printable line of ``width`` characters, with an ellipsis where it was longer."""
    text = printable_line(text)
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def short_number(value: float) -> str:
    """``13892`` -> ``13.9k``: three digits."""
    for unit in ("", "k", "M", "G"):
        if abs(value) < 999.5 or unit == "G":
            return f"{value:.3g}{unit}" if unit or value != int(value) else f"{value:.0f}"
        value /= 1000
    raise AssertionError("unreachable: the last unit takes every value")


def _job(row: JobRow, _: float) -> str:
    return ("  " if row.inside else "") + row.job


def _state(row: JobRow, _: float) -> str:
    if not row.folds:
        return row.state.value
    marks = {State.RUNNING: "R", State.PENDING: "P", State.COMPLETED: "✓"}
    numbers = Counter[str]()
    for state, count in row.counts:
        numbers[marks.get(state, "✗" if state.ended else "?")] += count
    return " ".join(f"{numbers[mark]}{mark}" for mark in "✗RP?✓" if mark in numbers)


def _percent_done(row: JobRow, _: float) -> str:
    return "" if row.share is None else f"{row.share:4.0%}{'t' if row.share_of == 'limit' else ''}"


def _progress(row: JobRow, now: float) -> str:
    return "" if row.share is None else f"{bar(row.share, 8)} {_percent_done(row, now)}"


def _left(row: JobRow, now: float) -> str:
    record = row.first.record
    if row.state is State.PENDING and record.start_estimate is not None:
        return "~" + moment(record.start_estimate, now)
    if row.left_s is not None:
        return human_duration(row.left_s)
    return ""


def _speed(row: JobRow, _: float) -> str:
    step = row.first.progress.step if row.first.progress is not None else None
    if step is None or step.throughput is None:
        return ""
    return f"{short_number(step.throughput)} {step.unit or ''}".rstrip()


def _last_loss(row: JobRow, _: float) -> str:
    progress = row.first.progress
    if progress is None:
        return ""
    if progress.step.has_diverged:
        return f"! {progress.step.loss:.3g}"
    return f"{progress.losses[-1]:.3g}" if progress.losses else ""


def _loss(row: JobRow, now: float) -> str:
    progress, last = row.first.progress, _last_loss(row, now)
    if progress is None or progress.step.has_diverged or not last:
        return last
    return f"{sparkline(progress.losses, 8)} {last}"


def _percent(row: JobRow, name: str) -> str:
    values = [value for node in row.nodes if (value := getattr(node.sample, name)) is not None]
    return f"{sum(values) / len(values):.0f}%" if values else ""


def _memory(row: JobRow, _: float) -> str:
    used = [node.sample.rss_bytes for node in row.nodes if node.sample.rss_bytes is not None]
    return human_bytes(int(sum(used))) if used else ""


def _elapsed_time(row: JobRow, _: float) -> str:
    times = [task.record.elapsed_s for task in row.tasks if task.record.elapsed_s is not None]
    return human_duration(max(times)) if times else ""


def _nodes(row: JobRow, _: float) -> str:
    record = row.first.record
    if row.folds:
        return f"{sum(n for _, n in row.counts)} tasks"
    return record.node_list or (str(record.nnodes) if record.nnodes else "")


def _note(row: JobRow, _: float) -> str:
    """Return an alarm, or the end of the job, or the reason for waiting."""
    record = row.first.record
    if row.alarms:
        return f"! {row.alarms[0]}"
    if record.state.ended:
        return ", ".join(record.ending) if record.state is not State.COMPLETED else ""
    return record.reason or ""


def _states(row: JobRow, _: float) -> str:
    """``RUNNING``; of an array ``1 COMPLETED, 3 PENDING``."""
    if len(row.tasks) == 1:
        return row.state.value
    counts = Counter[str]()
    for task in row.tasks:
        counts[task.record.state.value] += count_tasks(task.record.job_id)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _node_names(row: JobRow, now: float) -> str:
    record = row.first.record
    return _nodes(row, now) if len(row.tasks) > 1 else record.node_list or (str(record.nnodes) if record.nnodes else "")


def _steps(row: JobRow, _: float) -> str:
    """``120/1000, 3m20s left``; also a loss that is not a number."""
    progress = row.first.progress if len(row.tasks) == 1 else None
    if progress is None:
        return ""
    loss = progress.step.loss_text if progress.step.has_diverged else None
    return ", ".join(filter(None, (progress.of_total, progress.time_left, loss, progress.step.figures)))


def _start(row: JobRow, _: float) -> str:
    records = [task.record for task in row.tasks]
    if len(records) == 1 and records[0].start_estimate:
        return f"~{clock(records[0].start_estimate)}"
    return clock(min((record.started for record in records if record.started is not None), default=None))


def _exit(row: JobRow, _: float) -> str:
    """``3``, ``SIGKILL`` or ``1 (SIGABRT)``; Slurm's code 0 of a job that did not complete is omitted."""
    record = row.first.record
    code = str(record.exit_code) if record.exit_code or record.state is State.COMPLETED else ""
    if record.signal_name is None:
        return code
    return f"{code} ({record.signal_name})" if code else record.signal_name


def _reason(row: JobRow, _: float) -> str:
    """Return the reason of the first waiting task, or of the failed one."""
    waiting = (task.record.reason for task in row.tasks if task.record.reason and not task.record.state.ended)
    failed = row.first.record if row.first.record.state.ended else row.tasks[0].record
    return next(waiting, failed.reason) or ""


COLUMNS = (
    Column("JOB", "record.job_id", ps=_job, top=_job, width=9, rank=1),
    Column("NAME", "name", ps=lambda row, _: row.group.name, drop=8,
           top=lambda row, _: row.group.name, width=10, rank=3),
    Column("SITE", "site", ps=lambda row, _: row.group.site or "", drop=1,
           top=lambda row, _: row.group.site or "", width=8, rank=13),
    Column("STATE", "record.state", ps=_states, top=_state, width=13, rank=2),
    Column("NODES", "record.node_list", ps=_node_names, drop=3, top=_nodes, width=10, rank=11),
    Column("ELAPSED", "record.elapsed_s", ps=_elapsed_time, drop=5, top=_elapsed_time, width=7, rank=12, right=True),
    Column("PROGRESS", ps=_steps, blank="", drop=4, top=_progress, width=14, rank=4, short=_percent_done),
    Column("START", "record.started", ps=_start, drop=2),
    Column("LEFT", top=_left, width=12, rank=5, right=True),
    Column("SPEED", top=_speed, width=15, rank=7, right=True),
    Column("LOSS", top=_loss, width=17, rank=6, short=_last_loss),
    Column("GPU", top=lambda row, _: _percent(row, "gpu_percent"), width=4, rank=8, right=True),
    Column("CPU", top=lambda row, _: _percent(row, "cpu_percent"), width=4, rank=9, right=True),
    Column("MEMORY", top=_memory, width=6, rank=10, right=True),
    Column("EXIT", "record.exit_code", ps=_exit, drop=6),
    Column("REASON", "record.reason", ps=_reason, blank="", drop=7),
    Column("RUN FOLDER", "run_dir", ps=lambda row, _: row.group.run_dir or "", blank=""),
)  # fmt: skip
"""The columns of ``ps`` and ``top``, in their order. ``--json`` has the fields that they name."""
HEADERS = {column.json.rpartition(".")[2]: column.title for column in COLUMNS}
"""Field of ``--json`` -> title, for other tables of jobs."""
_ON_SCREEN = tuple(column for column in COLUMNS if column.top is not None)
_RANKED = tuple(column.title for column in sorted(_ON_SCREEN, key=lambda column: column.rank))
_NEEDED = 7
"""So many of these columns may squeeze the note to `_LEAST_NOTE`; the further ones leave it `_EASY_NOTE`."""
_LEAST_NOTE, _EASY_NOTE = 8, 24
_MOST_NAME = 26
_NOTE = Column("NOTE", top=_note, width=10_000)


def choose_columns(width: int, rows: Sequence[JobRow], now: float) -> list[Column]:
    """The columns of ``rows`` for a terminal of ``width``: the first ones that hold something and fit, and the note.

    Bars and sparklines are left out where they would take the room of a column that is needed, or of the note.
    """
    needed = {c.title for c in _held(_ON_SCREEN, rows, now)}.intersection(_RANKED[:_NEEDED])
    with_bars = _fitting(_ON_SCREEN, width, rows, now, needed=0)
    if needed <= {column.title for column in with_bars}:
        return with_bars
    without_bars = [c if c.short is None else c._replace(top=c.short) for c in _ON_SCREEN]
    return _fitting(without_bars, width, rows, now, needed=_NEEDED)


def _held(columns: Sequence[Column], rows: Sequence[JobRow], now: float) -> list[Column]:
    """Return the columns with content, no wider than it; the first three also without jobs."""
    longest = [max((len(column.text(row, now)) for row in rows), default=0) for column in columns]
    return [
        column._replace(width=min(column.width, max(length, len(column.title))))
        for column, length in zip(columns, longest, strict=True)
        if length or column.title in _RANKED[:3]
    ]


def _fitting(columns: Sequence[Column], width: int, rows: Sequence[JobRow], now: float, *, needed: int) -> list[Column]:
    """Return the first columns that fit, in their order; the name and the note share the remaining width."""
    held = {column.title: column for column in _held(columns, rows, now)}
    note, name = (max((len(c.text(row, now)) for row in rows), default=0) for c in (_NOTE, held["NAME"]))
    names, room = set[str](), width - _GAP
    for number, title in enumerate(_RANKED):
        least = min(max(note, len(_NOTE.title)), _LEAST_NOTE if number < needed else _EASY_NOTE)
        if title in held and held[title].width + _GAP + least <= room:
            names.add(title)
            room -= held[title].width + _GAP
    more = max(0, min(min(name, _MOST_NAME) - held["NAME"].width, max(room - note, (room - _LEAST_NOTE) // 2)))
    chosen = [c._replace(width=c.width + more) if c.title == "NAME" else c for c in held.values() if c.title in names]
    return [*chosen, _NOTE._replace(width=room - more)]


def cells(row: JobRow, columns: Sequence[Column], now: float) -> list[str]:
    """The row's text in each column, no wider than that."""
    texts = [cut(column.text(row, now), column.width) for column in columns]
    return [
        text.rjust(column.width) if column.right else text.ljust(column.width)
        for text, column in zip(texts, columns, strict=True)
    ]


def titles(columns: Sequence[Column]) -> list[str]:
    """The heads of the columns."""
    return [c.title.rjust(c.width) if c.right else c.title.ljust(c.width) for c in columns]


def moment(seconds: float, now: float) -> str:
    """A time of today as a clock, of another day with its date."""
    then, today = time.localtime(seconds), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%d %b %H:%M", then)


def headline(snapshot: Snapshot, *, sort: str, text: str, every_s: float, width: int) -> str:
    """Return the first line: filter and counts; at the right the order, the time and the interval of queries."""
    counts = ", ".join(f"{n} {state.value.lower()}" for state, n in count_states(snapshot.tasks)) or "no jobs"
    when = time.strftime("%H:%M:%S", time.localtime(snapshot.taken))
    right = f"by {sort}  {when}, every {human_duration(every_s)}"
    left = (f"filter: {text}  " if text else "") + counts
    return f"{cut(left, max(0, width - len(right) - 2)):<{max(0, width - len(right))}}{right}"[:width]


def describe(row: JobRow, now: float, width: int) -> list[str]:
    """Describe the chosen row: state, steps, loss, a line for each node, alarms."""
    task, record = row.first, row.first.record
    lines = [_summary(row, record, now)]
    lines += [f"! {alarm}" for alarm in row.alarms]
    if task.progress is not None:
        step = task.progress.step
        total = f" of {task.progress.total_steps}" if task.progress.total_steps else ""
        facts = [] if step.step is None else [f"step {step.step}{total}"]
        facts += [] if step.epoch is None or not math.isfinite(step.epoch) else [f"epoch {int(step.epoch) + 1}"]
        facts += [f"{task.progress.steps_per_s:.3g} steps/s"] if task.progress.steps_per_s else []
        if step.figures is not None:
            facts.append(step.figures)
        elif step.throughput is not None:
            facts.append(f"{short_number(step.throughput)} {step.unit or ''}".rstrip())
        if row.left_s is not None and row.share_of != "limit":
            facts.append(f"ends about {moment(now + row.left_s, now)}")
        lines.append(", ".join(facts))
        if step.has_diverged:
            lines.append(f"! {step.loss_text}")
        elif task.progress.losses:
            losses = task.progress.losses
            lines.append(f"loss {sparkline(losses, max(8, min(60, width - 20)))} {losses[-1]:.4g}")
    lines += [_node_line(node, now) for node in row.nodes]
    if not record.state.ended and record.reason and row.state is State.PENDING:
        lines.append(f"{record.reason}: {explain_reason(record.reason).text}")
    return [cut(line, width) for line in lines]


def _summary(row: JobRow, record: JobRecord, now: float) -> str:
    place = f" on {row.group.site}" if row.group.site else ""
    parts = [f"{row.job}  {row.group.name}{place}"]
    if row.folds:
        parts.append(", ".join(f"{n} {state.value}" for state, n in row.counts))
    else:
        limit = record.time_limit_s
        lasting = f" for {human_duration(record.elapsed_s)}" if record.elapsed_s is not None else ""
        of_limit = f" of {human_duration(limit)}" if limit and lasting else ""
        parts.append(record.state.value + lasting + of_limit)
        parts += [record.node_list] if record.node_list else []
        parts += record.ending
        if record.state is State.PENDING and record.start_estimate is not None:
            parts.append(f"expected to start {moment(record.start_estimate, now)}")
    return "  ".join(parts)


def _node_line(node: NodeSample, now: float) -> str:
    """``n1  GPU ██████░░  71% 12.5G  CPU ████░░░░  48%  memory 1.5G of 8G  (2s ago)``."""
    sample = node.sample
    parts = [f"{node.host:<10}"]
    if sample.gpu_percent is not None:
        held = f" {human_bytes(int(sample.gpu_memory_bytes))}" if sample.gpu_memory_bytes is not None else ""
        parts.append(f"GPU {bar(sample.gpu_percent / 100, 8)} {sample.gpu_percent:3.0f}%{held}")
    if sample.cpu_percent is not None:
        parts.append(f"CPU {bar(sample.cpu_percent / 100, 8)} {sample.cpu_percent:3.0f}%")
    if sample.rss_bytes is not None:
        limit = f" of {human_bytes(int(sample.memory_limit_bytes))}" if sample.memory_limit_bytes else ""
        parts.append(f"memory {human_bytes(int(sample.rss_bytes))}{limit}")
    parts.append(f"({human_duration(max(0.0, now - node.taken))} ago)")
    return "  ".join(parts)
