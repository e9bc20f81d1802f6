"""How Slurm spells single values, over its versions."""

from __future__ import annotations

import pytest

from hpcjobs.scheduler.slurm.parse import count_gpus, read_bytes, read_clock_s, read_count, read_exit, read_resource


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784), ("02:03:04", 7384), ("03:04", 184), ("03:04.5", 184.5), ("", None), ("1:2:3:4", None)],
)
def test_a_duration_is_read_with_days_and_fractions(text: str, seconds: float | None) -> None:
    assert read_clock_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("2048M", 2 << 30), ("1.5G", 3 << 29), ("123456", 123456), ("218296K", 218296 << 10), ("4Gc", None), ("?", None)],
)
def test_a_size_is_read_in_bytes(text: str, size: int | None) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "Unknown", "UNLIMITED", "4294967294", "18446744073709551615", "-1", "²"])
def test_a_count_that_is_none_of_slurms_numbers_is_none(text: str) -> None:
    assert read_count(text) is None


def test_an_exit_code_and_a_signal_are_told_apart() -> None:
    assert [read_exit(text) for text in ("3:0", "0:9", "")] == [(3, None), (0, 9), (None, None)]


def test_gpus_are_counted_with_and_without_their_type() -> None:
    assert count_gpus("cpu=4,gres/gpu=2,gres/gpu:a100=2") == 2
    assert count_gpus("cpu=4,gres/gpu:a100=2,gres/gpu:h100=1") == 3
    assert count_gpus("cpu=4,mem=2048M") is None
    assert read_resource("cpu=4,mem=2048M", "mem") == "2048M"
