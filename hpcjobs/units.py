"""Slurm's spellings of time, memory and job arrays (``0-9``, ``1,3,5-7``, ``0-100:10``, ``0-99%4``)."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterable

from hpcjobs.errors import HpcJobsWarning

UNLIMITED = "UNLIMITED"
_UNLIMITED = ("unlimited", "infinite")
_CLOCK = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<fields>\d{1,9}(?::\d{1,9}){0,2})\Z", re.ASCII)
_PARTS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(w|d|h|m|s)", re.ASCII)
_SECONDS = {"w": 604800, "d": 86400, "h": 3600, "m": 60, "s": 1}
_MEMORY = re.compile(r"(?P<count>\d{1,12}(?:\.\d{1,6})?)(?P<unit>[KMGTP]?)\Z", re.ASCII)
_BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
LEAST_BARE_MEMORY = 1000
"""A number without a unit is megabytes, as Slurm counts, from here on; people who write less mean gigabytes."""


def walltime_s(text: str) -> int:
    """Seconds of a time limit: ``2h``, ``1h30m``, ``90m``, ``D-HH[:MM[:SS]]``, ``HH:MM:SS``, ``MM:SS``.

    A bare number is refused: Slurm reads it as minutes, people mean hours, and YAML turns an
    unquoted ``12:30:00`` into 45000.

    Raises ValueError: the text has another form, or is zero.
    """
    stripped = text.strip()
    clock = _CLOCK.match(stripped)
    seconds = 0.0
    if clock and (clock["days"] or ":" in stripped):
        fields = [int(part) for part in clock["fields"].split(":")]
        if clock["days"]:
            fields += [0] * (3 - len(fields))
        elif len(fields) == 2:
            fields = [0, *fields]
        seconds = int(clock["days"] or 0) * 86400 + fields[0] * 3600 + fields[1] * 60 + fields[2]
    elif _PARTS.sub("", stripped) == "" and stripped:
        seconds = sum(float(n) * _SECONDS[unit] for n, unit in _PARTS.findall(stripped))
    if seconds < 1:
        raise ValueError(f"{text!r} is not a time; write 2h, 90m, 1h30m, 02:00:00 or 1-12:00:00")
    return round(seconds)


def time_limit(text: str) -> str:
    """A time limit in the spelling every Slurm option accepts; ``UNLIMITED`` and ``infinite`` are limits too.

    Raises ValueError: neither a time nor one of these.
    """
    if text.strip().lower() in _UNLIMITED:
        return UNLIMITED
    try:
        return slurm_time(walltime_s(text))
    except ValueError as error:
        raise ValueError(f"{error}, or UNLIMITED") from error


def requested_time(text: str) -> str:
    """As `time_limit`; a bare number is minutes, as sbatch reads it. YAML must quote a bare number.

    Raises ValueError: as `time_limit`.
    """
    stripped = text.strip()
    if _CLOCK.match(stripped) and not stripped.strip("0:-"):
        raise ValueError(f"sbatch reads {text!r} as no limit; write UNLIMITED")
    return time_limit(f"{stripped}m" if stripped.isascii() and stripped.isdecimal() else stripped)


def time_limit_s(text: str | None) -> int | None:
    """Seconds of a time limit; ``None`` without a limit."""
    return None if text is None or text.strip().lower() in _UNLIMITED else walltime_s(text)


def slurm_time(seconds: int) -> str:
    """``93784`` -> ``1-02:03:04``: the spelling every Slurm option accepts."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def memory_bytes(text: str) -> int:
    """Bytes of ``64G``, ``1500M``, ``1.5T`` (powers of 1024, as Slurm counts). ``0`` means the whole node.

    A number without a unit is megabytes, as sinfo and slurm.conf have it: ``192000``.

    Raises ValueError: neither of these, or a number without a unit that is too small to be megabytes.
    """
    stripped = text.strip().upper().removesuffix("B")
    if stripped == "0":
        return 0
    match = _MEMORY.match(stripped)
    if match is None:
        more = "; the + of sinfo means that nodes have more: write what each one has" if stripped.endswith("+") else ""
        raise ValueError(f"{text!r} is not a memory size; write 64G, 1500M, or 0 for the whole node{more}")
    if not match["unit"] and float(match["count"]) < LEAST_BARE_MEMORY:
        raise ValueError(f"{text!r} has no unit; write {match['count']}G or {match['count']}M")
    return int(float(match["count"]) * _BYTES[match["unit"] or "M"])


def format_megabytes(megabytes: int | None) -> int | str | None:
    """Memory as a site file has it: few megabytes need their unit; None of none."""
    if not megabytes:
        return None
    return megabytes if megabytes >= LEAST_BARE_MEMORY else f"{megabytes}M"


def format_count(count: int, noun: str) -> str:
    """``1 node``, ``3 nodes``: with a plural that ends in s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def cell(value: object) -> str:
    """A value as a cell of a table; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def number_style(value: float) -> str:
    """The format of a number for people: from 100 on, separated thousands and no decimals; below, three digits."""
    return ",.0f" if abs(value) >= 100 else ".3g"


def format_number(value: float) -> str:
    """``1,235`` and ``1.23``: never with an exponent where it is large."""
    return f"{value:{number_style(value)}}"


def slurm_memory(text: str) -> str:
    """``text`` as every Slurm option accepts it: whole numbers with a unit. Raises ValueError: as `memory_bytes`."""
    size = memory_bytes(text)
    if size == 0:
        return "0"
    stripped = text.strip().upper().removesuffix("B")
    return stripped if stripped[:-1].isdigit() and stripped[-1] in _BYTES else f"{-(-size >> 20)}M"


def requested_memory(text: int | str) -> str:
    """As `slurm_memory`; a number without a unit is megabytes, as sbatch reads it, and a small one brings a warning.

    Raises ValueError: as `memory_bytes`.
    """
    arg = str(text).strip()
    if not (arg.isascii() and arg.isdecimal() and 0 < int(arg) < LEAST_BARE_MEMORY):
        return slurm_memory(arg)
    warnings.warn(
        HpcJobsWarning(f"memory {arg} is {arg} megabytes, as sbatch reads it; {arg}G is gigabytes"), stacklevel=2
    )
    return f"{int(arg)}M"


def human_bytes(count: int) -> str:
    """``1610612736`` -> ``1.5G``."""
    value, unit = float(count), "B"
    for unit in ("B", "K", "M", "G", "T"):
        if round(value, 1) < 1024 or unit == "T":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if value == int(value) else f"{value:.1f}{unit}"


def human_duration(seconds: float) -> str:
    """``3723`` -> ``1h02m``: two units, for tables."""
    total = int(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total // 60 % 60:02d}m"
    return f"{total // 86400}d{total // 3600 % 24:02d}h"


def clock(seconds: float | None) -> str:
    """Return a moment as local time, with the date if it is not today; ``-`` if unknown."""
    if seconds is None:
        return "-"
    then = time.localtime(seconds)
    today = time.strftime("%F", then) == time.strftime("%F")
    return time.strftime("%H:%M:%S" if today else "%F %H:%M", then)


MAX_INDEX = 4_000_000
"""The largest index that Slurm can be configured to take (MaxArraySize is at most 4000001)."""
MAX_TASKS = 100_000
"""The most tasks of an array, and cells of a sweep, that hpcjobs submits: it keeps a record of each."""

_PART = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?\Z", re.ASCII)
_THROTTLE = re.compile(r"[1-9]\d*\Z", re.ASCII)
_DIGITS = 10
"""Most digits of an index; Python refuses to read thousands of them."""


def check_array(spec: str) -> None:
    """Check an array that is to be submitted, without expanding it.

    Raises ValueError: not an array specification, or too large.
    """
    if (tasks := sum(map(len, index_ranges(spec)))) > MAX_TASKS:
        raise ValueError(f"{tasks} tasks; hpcjobs submits arrays of up to {MAX_TASKS}")


def array_indices(spec: str) -> list[int]:
    """The task indices of ``spec``, ascending; the throttle after ``%`` does not matter here.

    Raises ValueError: not an array specification, or an index above `MAX_INDEX`.
    """
    return sorted(set[int]().union(*index_ranges(spec)))


def array_text(indices: Iterable[int]) -> str:
    """``[3, 4, 5, 9]`` -> ``3-5,9``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index])
    return ",".join("-".join(str(n) for n in run) for run in runs)


def index_ranges(spec: str) -> list[range]:
    """The parts of ``spec`` in its order, not expanded. Raises ValueError: as `array_indices`."""
    parts, throttled, throttle = spec.partition("%")
    if throttled and not _THROTTLE.match(throttle):
        raise _not_understood(spec)
    return [_range(part, spec) for part in parts.split(",")]


def _range(part: str, spec: str) -> range:
    match = _PART.match(part)
    if match is None:
        raise _not_understood(spec)
    texts = (match[1], match[2] or match[1], match[3] or "1")
    if any(len(text.lstrip("0")) > _DIGITS for text in texts):
        raise _too_large(part)
    first, last, step = map(int, texts)
    if last < first:
        raise _not_understood(spec)
    if last > MAX_INDEX:
        raise _too_large(part)
    return range(first, last + 1, step)


def _not_understood(spec: str) -> ValueError:
    return ValueError(f"array {spec[:80]!r} is not understood; write 0-9, 1,3,5, 0-100:10 or 0-99%4")


def _too_large(part: str) -> ValueError:
    return ValueError(f"{part[:80]!r}: the largest index that Slurm can take is {MAX_INDEX}")


def count_tasks(job_id: str) -> int:
    """How many tasks an id stands for: 3 for ``12_[3-5%2]``, 1 for ``12`` and ``12_3``."""
    _, bracket, inside = job_id.partition("_[")
    return sum(map(len, index_ranges(inside.rstrip("]")))) if bracket else 1


def parent_id(job_id: str) -> str:
    """The job that a task of an array (``12_3``), or a component of a heterogeneous job (``12+1``), belongs to."""
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def form_of(job_id: str) -> str:
    """``_`` of a task of an array, ``+`` of a component of a heterogeneous job, and nothing of a plain job.

    One job has one form: ids of one parent with different forms are of jobs that got the same id.
    """
    return job_id[len(parent_id(job_id)) :][:1]


def task_ids(job_id: str) -> list[str]:
    """The plain ids in one that Slurm prints: ``12_[3-5%2]`` (tasks still pending) -> ``12_3 12_4 12_5``."""
    parent, bracket, inside = job_id.partition("_[")
    if not bracket:
        return [job_id]
    return [f"{parent}_{index}" for index in array_indices(inside.rstrip("]"))]
