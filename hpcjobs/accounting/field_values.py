"""sacct's spellings of numbers, as polars expressions and series."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import polars as pl

from hpcjobs.accounting.parse import Doubts

# What sacct prints where there is nothing to say; 4294967295 and 2^64-2 are Slurm's own "no value".
NOTHING: Final = (
    "Unknown",
    "None",
    "N/A",
    "NONE",
    "None assigned",
    "(null)",
    "UNLIMITED",
    "Partition_Limit",
    "INVALID",
    "18446744073709551614",
    "18446744073709551615",
    "18446744073709551614",
    "18446744073709551615",
)
_LARGEST: Final = 1 << 62
_NO_VALUE: Final = (4294967294, 4294967295)
_UNITS: Final = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40, "P": 2.0**50}


def whole(frame: pl.DataFrame, column: str, doubts: Doubts) -> pl.Series:
    """Whole numbers; a word that is neither a number nor one of Slurm's "nothing" is counted and left null."""
    text = frame[column]
    numbers = text.cast(pl.Int64, strict=False)
    if numbers.null_count() > text.null_count():
        odd = frame.filter(text.is_not_null() & numbers.is_null() & ~text.is_in(NOTHING))
        if column.startswith(("MaxRSS", "AveRSS")):
            return size(text)
        doubts.add(f"{column} is no number", (f"{job}: {word!r}" for job, word in odd.select("JobID", column).rows()))
    return _valid(numbers)


def _valid(numbers: pl.Series) -> pl.Series:
    low, high = numbers.min(), numbers.max()
    if low is None or (isinstance(low, int) and isinstance(high, int) and low >= 0 and high < _NO_VALUE[0]):
        return numbers
    bad = numbers.is_in(_NO_VALUE) | (numbers < 0) | (numbers > _LARGEST)
    return numbers.set(bad.fill_null(False), None) if bad.any() else numbers


def size(text: pl.Series) -> pl.Series:
    """Bytes of ``123456``, ``218296K``, ``1.5G`` (powers of 1024)."""
    name = text.name
    parts = text.str.to_uppercase().str.extract_groups(r"^([\d.]+)([KMGTP]?)$").struct.unnest()
    number = parts.to_series(0).cast(pl.Float64, strict=False)
    unit = parts.to_series(1).replace_strict(_UNITS, default=None, return_dtype=pl.Float64)
    found: pl.Series = (number * unit).round().cast(pl.Int64, strict=False).alias(name)
    return found


def by_word(text: pl.Series, read: Callable[[str], object], dtype: type[pl.DataType]) -> pl.Series:
    """``read`` of each word, asked once for each word there is: for columns that repeat themselves."""
    words = [word for word in text.unique().to_list() if word is not None]
    read_once: pl.Series = text.replace_strict(words, [read(word) for word in words], default=None, return_dtype=dtype)
    return read_once


def tres(text: str, resource: str) -> str | None:
    """The value of ``resource`` in ``billing=4,cpu=4,mem=2048M,node=2``."""
    return next((value for name, _, value in (p.partition("=") for p in text.split(",")) if name == resource), None)


def gpu_count(text: str) -> int | None:
    """GPUs of ``gres/gpu=2,gres/gpu:a100=2``: the untyped count, else the typed ones together."""
    if (untyped := tres(text, "gres/gpu")) is not None:
        return int(untyped) if untyped.isdigit() else None
    typed = [part.partition("=")[2] for part in text.split(",") if part.startswith("gres/gpu:")]
    return sum(map(int, typed)) if typed and all(n.isdigit() for n in typed) else None


def bytes_of(word: str | None) -> int | None:
    """Bytes of ``2048M``, ``1.5G``, ``123456``."""
    match = re.fullmatch(r"([\d.]+)([KMGTP]?)[BN]?", (word or "").upper())
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def exit_of(word: str, part: int) -> int | None:
    """Exit code (part 0) or signal (part 1) of ``3:9``."""
    code = word.split(":")
    return int(code[part]) if len(code) == 2 and code[part].isdigit() else None


def usage(text: pl.Series, resource: str) -> pl.Series:
    """Bytes of ``resource`` in a column like TRESUsageInTot, where no two rows are the same."""
    found = text.str.extract(rf"(?:^|,){resource}=([\d.]+[KMGTP]?)")
    plain = found.cast(pl.Int64, strict=False)
    return plain if plain.null_count() == found.null_count() else size(found)


def clock_of(word: str | None) -> float | None:
    """Seconds of ``1-02:03:04``, ``02:03:04``, ``03:04.567``."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):([\d.]+)", word or "")
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return days * 86400 + hours * 3600 + minutes * 60 + float(match[4])


def clock_s(column: str) -> pl.Expr:
    """Seconds of ``1-02:03:04``, ``02:03:04``, ``03:04.567``."""
    clock = pl.col(column).str.extract_groups(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):([\d.]+)$").struct
    fields = [clock.field(str(n)).cast(pl.Float64, strict=False) for n in (1, 2, 3, 4)]
    days, hours, minutes, seconds = fields
    return days.fill_null(0) * 86400 + hours.fill_null(0) * 3600 + minutes * 60 + seconds


def text(column: str) -> pl.Expr:
    """Null for what sacct prints where there is nothing to say."""
    return pl.when(~pl.col(column).is_in(NOTHING)).then(pl.col(column))
