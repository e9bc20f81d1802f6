"""Checks of values that people write into files, and the base class of such values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated

import msgspec

from hpcjobs.units import slurm_memory, time_limit, walltime_s

Moment = Annotated[float, msgspec.Meta(ge=0, lt=253402300800)]
"""Seconds since 1970, up to the year 9999, also in files that others may have written. ``--json`` prints a time."""


class Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the values read from YAML."""


MOST = 10_000_000
"""A count beyond it is a slip of the finger."""
_LONGEST_NAME = 180
"""Most characters: a file name has 255, and names of a run contain more than the job's name."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\Z", re.ASCII)
_SLURM_NAME = re.compile(r"\w[\w.:+@/=~-]*\Z", re.ASCII)


def check_name(value: str, what: str) -> None:
    """Refuse a ``what`` that needs quoting in a file name or a Slurm option."""
    if not _NAME.match(value):
        raise ValueError(f"{what} {value!r}: use letters, digits, '_', '.', '-', and start with a letter or digit")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"{what} {value[:20]}...: {len(value)} characters, at most {_LONGEST_NAME} are allowed")


def check_job_name(value: str) -> None:
    """Refuse a name of a job that Slurm, or a line of a script, cannot hold."""
    check_line(value, "job name")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"job name {value[:20]}...: {len(value)} characters, at most {_LONGEST_NAME} are allowed")


def check_slurm_name(value: str, what: str) -> None:
    """Refuse a ``what`` that cannot be a partition, QOS or feature of Slurm, or needs quotes in a job script."""
    if not _SLURM_NAME.match(value):
        raise ValueError(f"{what} {value!r}: use letters, digits and _.:+@/=~-, and start with a letter, a digit or _")
    if len(value) > _LONGEST_NAME:
        raise ValueError(f"{what} {value[:20]}...: {len(value)} characters, at most {_LONGEST_NAME} are allowed")


def is_name(value: str, check: Callable[[str, str], None] = check_name) -> bool:
    """Whether ``check`` accepts the value as a name."""
    try:
        check(value, "name")
    except ValueError:
        return False
    return True


def check_count(value: int, what: str, *, least: int = 1) -> None:
    """Refuse a count below ``least`` (0 or 1), or beyond reason."""
    if value < least:
        raise ValueError(f"{what} must {'be positive' if least else 'not be negative'}, not {value}")
    if value > MOST:
        raise ValueError(f"{what} must be at most {MOST}, not {value}")


def check_line(value: str, what: str) -> None:
    """Refuse a value that does not fit into one line of a script."""
    if not value or any(ord(char) < 32 for char in value):
        raise ValueError(f"{what} {value!r}: empty values, newlines and control characters are refused")


def check_amount(value: float | None, what: str) -> None:
    """Refuse an impossible price or power."""
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} must be a number, finite and not negative, not {value}")


def check_duration(value: str | None, what: str) -> None:
    """Refuse a value that is not a time with a unit."""
    if value is not None:
        try:
            walltime_s(value)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from error


def check_time_limit(owner: msgspec.Struct, field: str) -> None:
    """Put the time limit in ``field`` into Slurm's spelling, or refuse it."""
    value = getattr(owner, field)
    if value is not None:
        try:
            msgspec.structs.force_setattr(owner, field, time_limit(value))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error


def check_memory(owner: msgspec.Struct, field: str) -> None:
    """Put the memory in ``field`` into Slurm's spelling, or refuse it."""
    value = getattr(owner, field)
    if value is not None:
        try:
            msgspec.structs.force_setattr(owner, field, slurm_memory(str(value)))
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error
