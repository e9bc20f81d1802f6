"""Slurm's spellings of values (`scheduler.slurm.fields`) for whole columns: polars expressions and series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import polars as pl

from hpcjobs.accounting.doubts import Doubts
from hpcjobs.scheduler.slurm.fields import NO_NUMBER, NO_VALUE, NOTHING, UNIT_BYTES

_LARGEST: Final = 1 << 62
_NO_COUNT: Final = sorted(value for value in NO_VALUE if value < _LARGEST)
_BLANK: Final = [*NOTHING, *NO_NUMBER, *map(str, NO_VALUE)]


def read_counts(frame: pl.DataFrame, column: str, doubts: Doubts) -> pl.Series:
    """Whole numbers; a text that is neither a number nor one of Slurm's for no value is counted and left null."""
    text = frame[column]
    numbers = text.cast(pl.Int64, strict=False)
    if numbers.null_count() > text.null_count():
        odd = frame.filter(text.is_not_null() & numbers.is_null() & ~text.is_in(_BLANK))
        if column.startswith(("MaxRSS", "AveRSS")):
            return read_sizes(text)
        doubts.add(f"{column} is no number", (f"{job}: {value!r}" for job, value in odd.select("JobID", column).rows()))
    return _without_no_value(numbers)


def _without_no_value(numbers: pl.Series) -> pl.Series:
    low, high = numbers.min(), numbers.max()
    if low is None or (isinstance(low, int) and isinstance(high, int) and low >= 0 and high < _NO_COUNT[0]):
        return numbers
    bad = numbers.is_in(_NO_COUNT) | (numbers < 0) | (numbers > _LARGEST)
    return numbers.set(bad.fill_null(False), None) if bad.any() else numbers


def read_sizes(text: pl.Series) -> pl.Series:
    """Bytes of ``123456``, ``218296K``, ``1.5G`` (powers of 1024)."""
    parts = text.str.to_uppercase().str.extract_groups(r"^(\d+(?:\.\d*)?)([KMGTP]?)[BN]?$").struct.unnest()
    number = parts.to_series(0).cast(pl.Float64, strict=False)
    unit = parts.to_series(1).replace_strict(UNIT_BYTES, default=None, return_dtype=pl.Float64)
    sizes: pl.Series = (number * unit).round().cast(pl.Int64, strict=False).alias(text.name)
    return sizes


def map_distinct(text: pl.Series, read: Callable[[str], object], dtype: type[pl.DataType]) -> pl.Series:
    """``read`` of each value, called once for each value there is: for columns that repeat themselves."""
    values = text.unique().drop_nulls().to_list()
    mapped: pl.Series = text.replace_strict(values, [read(value) for value in values], default=None, return_dtype=dtype)
    return mapped


def read_usage(text: pl.Series, resource: str) -> pl.Series:
    """Bytes of ``resource`` in a column like TRESUsageInTot, where no two rows are the same."""
    amounts = text.str.extract(rf"(?:^|,){resource}=([\d.]+[KMGTP]?)")
    numbers = amounts.cast(pl.Int64, strict=False)
    return numbers if numbers.null_count() == amounts.null_count() else read_sizes(amounts)


def clock_s(column: str) -> pl.Expr:
    """Seconds of ``1-02:03:04``, ``02:03:04``, ``03:04.567``."""
    clock = pl.col(column).str.extract_groups(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d*)?)$").struct
    days, hours, minutes, seconds = (clock.field(str(n)).cast(pl.Float64, strict=False) for n in (1, 2, 3, 4))
    return days.fill_null(0) * 86400 + hours.fill_null(0) * 3600 + minutes * 60 + seconds


def known_text(column: str) -> pl.Expr:
    """Null for what sacct prints where there is no value."""
    return pl.when(~pl.col(column).is_in([*NOTHING])).then(pl.col(column))
