"""Whole columns are read as single values are: the accounting and the scheduler client understand Slurm alike."""

from __future__ import annotations

import polars as pl
import pytest

from hpcjobs.jobstats.columns import Doubts
from hpcjobs.jobstats.fold import clock_s, known_text, read_counts, read_sizes, read_usage
from hpcjobs.scheduler.slurm import parse


@pytest.mark.parametrize("value", ["1-02:03:04", "02:03:04", "03:04.567", "00:00:00", "04", "INVALID", "1:2:3:4", ""])
def test_durations(value: str) -> None:
    column = pl.DataFrame({"TotalCPU": [value]}).select(seconds=clock_s("TotalCPU"))["seconds"]
    assert column.to_list() == [parse.read_clock_s(value)]


@pytest.mark.parametrize("value", ["123456", "218296K", "1.5G", "16384M", "0", "4Gn", "1.5.2G", "-1", "x", ""])
def test_sizes(value: str) -> None:
    assert read_sizes(pl.Series([value])).to_list() == [parse.read_bytes(value)]


@pytest.mark.parametrize("value", ["7", "0", "4294967294", "18446744073709551614", "UNLIMITED", "Unknown", ""])
def test_counts(value: str) -> None:
    doubts = Doubts()
    assert read_counts(pl.DataFrame({"JobID": ["1"], "NNodes": [value]}), "NNodes", doubts).to_list() == [
        parse.read_count(value)
    ]
    assert doubts.by_frequency() == []


def test_a_count_that_is_none_is_named() -> None:
    doubts = Doubts()
    assert read_counts(pl.DataFrame({"JobID": ["7"], "NNodes": ["two"]}), "NNodes", doubts).to_list() == [None]
    assert doubts.by_frequency() == [("NNodes is no number", 1, ("7: 'two'",))]


@pytest.mark.parametrize("usage", ["cpu=00:00:10,mem=5120K,pages=0", "mem=4096", "vmem=7,fs/mem=3", ""])
def test_usage_of_a_resource(usage: str) -> None:
    assert read_usage(pl.Series([usage]), "mem").to_list() == [parse.read_bytes(parse.read_resource(usage, "mem"))]


@pytest.mark.parametrize("value", ["normal", "None", "N/A", "(null)", "INVALID"])
def test_texts(value: str) -> None:
    assert pl.DataFrame({"QOS": [value]}).select(known_text("QOS"))["QOS"].to_list() == [parse.read_text(value)]
