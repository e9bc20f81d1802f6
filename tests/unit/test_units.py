"""Times and sizes as people and Slurm write them."""

from __future__ import annotations

import pytest

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.units import (
    human_bytes,
    human_duration,
    memory_bytes,
    requested_memory,
    slurm_memory,
    slurm_time,
    time_limit,
    time_limit_s,
    walltime_s,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("45s", 45),
        ("1d12h", 129600),
        ("2w", 1209600),
        ("02:00:00", 7200),
        ("30:00", 1800),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:00:01", 129601),
        ("100:00:00", 360000),
        (" 2h ", 7200),
    ],
)
def test_a_time_limit_is_read_in_every_usual_spelling(text: str, seconds: int) -> None:
    assert walltime_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "60", "45000", "0", "0h", "00:00:00", "1:2:3:4", "soon", "2 h", "h", "-1h", "1h-2m"]
)
def test_a_time_limit_that_could_mean_two_things_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write 2h"):
        walltime_s(text)


@pytest.mark.parametrize("seconds", [1, 59, 60, 3599, 3600, 86399, 86400, 93784, 31536000])
def test_a_time_survives_the_way_to_slurm_and_back(seconds: int) -> None:
    assert walltime_s(slurm_time(seconds)) == seconds


def test_slurm_gets_days_before_the_clock() -> None:
    assert (slurm_time(93784), slurm_time(61)) == ("1-02:03:04", "00:01:01")


@pytest.mark.parametrize(
    ("text", "count"),
    [("64G", 64 << 30), ("1500M", 1500 << 20), ("1t", 1 << 40), ("2GB", 2 << 30), ("7K", 7168), ("0", 0)],
)
def test_memory_is_counted_in_powers_of_1024(text: str, count: int) -> None:
    assert memory_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "64X", "-1G", "64 G", "1.5.5G", "9" * 5000])
def test_memory_that_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a memory size; write 64G"):
        memory_bytes(text)


@pytest.mark.parametrize("text", ["64", "512", "999"])
def test_a_small_number_without_a_unit_is_answered_with_both_ways_to_write_it(text: str) -> None:
    """Slurm would take 64 for 64 megabytes."""
    with pytest.raises(ValueError, match=f"has no unit; write {text}G or {text}M"):
        memory_bytes(text)


def test_a_request_reads_memory_as_sbatch_does_and_names_what_is_surprising() -> None:
    with pytest.warns(HpcJobsWarning, match="memory 64 is 64 megabytes, as sbatch reads it; 64G is gigabytes"):
        assert requested_memory("64") == "64M"
    assert (requested_memory(64000), requested_memory("64G"), requested_memory("0")) == ("64000M", "64G", "0")


def test_memory_as_sinfo_and_scontrol_print_it_is_understood() -> None:
    assert (slurm_memory("192000"), slurm_memory("1.5T"), slurm_memory("187.50G")) == ("192000M", "1572864M", "192000M")
    assert (slurm_memory("64gb"), slurm_memory("0"), slurm_memory("0G")) == ("64G", "0", "0")
    assert slurm_memory("0.5M") == "1M"  # and not 0, the whole node
    with pytest.raises(ValueError, match=r"the \+ of sinfo means that nodes have more"):
        slurm_memory("385408+")


@pytest.mark.parametrize("text", ["UNLIMITED", "unlimited", "infinite", "INFINITE"])
def test_no_limit_is_a_limit_that_can_be_asked_for(text: str) -> None:
    assert (time_limit(text), time_limit_s(text)) == ("UNLIMITED", None)


def test_sizes_and_durations_are_short_in_tables() -> None:
    assert human_bytes((1 << 30) - 1) == "1.0G"
    assert [human_bytes(n) for n in (0, 1023, 1536 << 20, 64 << 30, 5 << 50)] == ["0B", "1023B", "1.5G", "64G", "5120T"]
    assert [human_duration(s) for s in (0, 59.9, 61, 3723, 90000)] == ["0s", "59s", "1m01s", "1h02m", "1d01h"]
