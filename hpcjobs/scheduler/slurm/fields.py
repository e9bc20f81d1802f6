"""Reads values as Slurm's commands spell them: texts, counts, times, sizes, exit codes, resources. None: no value."""

from __future__ import annotations

import re
from typing import Final

NOTHING: Final = frozenset(("", "Unknown", "None", "NONE", "N/A", "None assigned", "(null)"))
"""Slurm's texts for a missing value."""
NO_NUMBER: Final = frozenset(("UNLIMITED", "Partition_Limit", "INVALID"))
"""Slurm's texts for a missing number."""
NO_VALUE: Final = frozenset((4294967294, 4294967295, 18446744073709551614, 18446744073709551615))
"""Its NO_VAL, INFINITE, NO_VAL64 and INFINITE64, which some versions print as a number."""
UNIT_BYTES: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d*)?)", re.ASCII)
_SHOWN_FIELD = re.compile(r"(?:^| )([A-Z][A-Za-z_:/]*)=(.*?)(?= [A-Z][A-Za-z_:/]*=|\s*$)")
_SIZE = re.compile(r"(\d+(?:\.\d*)?)([KMGTP]?)[BN]?", re.ASCII)


def read_shown(record: str) -> dict[str, str]:
    """The fields of one record of ``scontrol --oneliner show``; a value, such as a path, may hold blanks.

    The first field of a name counts: the comments of users and sites, at the end, may hold NAME=VALUE too. A job's name
    may as well, and goes up to UserId. A job with two of these has no fields: its user may have invented either.
    """
    if record.startswith("JobId=") and record.count(" UserId=") > 1:
        return {}
    before, _, behind = record.partition(" JobName=")
    name, *rest = behind.split(" UserId=")
    if not before.startswith("JobId=") or not rest:
        return dict(reversed(_SHOWN_FIELD.findall(record)))
    if " HetJobId=" in before:  # then the name is followed by the set of the job's components
        name = name.rpartition(" HetJobIdSet=")[0] or name
    behind_name = _SHOWN_FIELD.findall(f"UserId={rest[0]}")
    return dict(reversed([*_SHOWN_FIELD.findall(before), ("JobName", name), *behind_name]))


def read_text(value: str) -> str | None:
    """The text itself."""
    return None if value in NOTHING else value


def read_name(value: str) -> str | None:
    """A name that a user chose, which may be any word: ``None`` too.

    slurmdbd calls a job "allocation" that ended before slurmctld sent its name, for some seconds.
    """
    return None if value in ("", "(null)", "allocation") else value


def read_job_name(value: str) -> str | None:
    """A job's name, with ``?`` for each byte that is not UTF-8: so slurmdbd keeps it, and records can be compared."""
    name = read_name(value)
    return None if name is None else name.encode("utf-8", "replace").decode()


def read_count(value: str) -> int | None:
    """A whole number that is not negative."""
    number = int(value) if value.isascii() and value.isdecimal() else None
    return None if number in NO_VALUE else number


def read_time(value: str) -> float | None:
    """Seconds since 1970, as SLURM_TIME_FORMAT=%s prints them; 0 is Slurm's "not yet"."""
    return float(value) if value.isascii() and value.isdecimal() and int(value) > 0 else None


def read_clock_s(value: str | None) -> float | None:
    """Seconds of ``1-02:03:04``, ``02:03:04``, ``03:04`` or ``03:04.567``."""
    match = _CLOCK.fullmatch(value or "")
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return days * 86400 + hours * 3600 + minutes * 60 + float(match[4])


def read_bytes(value: str | None) -> int | None:
    """Bytes of ``2048M``, ``1.5G``, ``218296K`` (powers of 1024) or ``123456``."""
    match = _SIZE.fullmatch((value or "").upper())
    return round(float(match[1]) * UNIT_BYTES[match[2]]) if match else None


def read_exit(value: str) -> tuple[int | None, int | None]:
    """Exit code and signal of ``3:9``; signal 0 is read as None."""
    code, _, signal = value.partition(":")
    return read_count(code), read_count(signal) or None


def read_resource(value: str, resource: str) -> str | None:
    """The amount of ``resource`` in a list such as ``billing=4,cpu=4,mem=2048M,node=2``."""
    amounts = (part.partition("=") for part in value.split(","))
    return next((amount for name, _, amount in amounts if name == resource), None)


def count_gpus(value: str) -> int | None:
    """GPUs of ``gres/gpu=2,gres/gpu:a100=2``: the count without a type, or the sum over all types."""
    if (total := read_resource(value, "gres/gpu")) is not None:
        return read_count(total)
    of_types = [read_count(part.partition("=")[2]) for part in value.split(",") if part.startswith("gres/gpu:")]
    counts = [count for count in of_types if count is not None]
    return sum(counts) if counts and len(counts) == len(of_types) else None
