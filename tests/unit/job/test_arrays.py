"""Array specifications: which tasks they mean, and how many may be submitted."""

from __future__ import annotations

import pytest

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.units import array_indices, count_tasks, task_ids


def test_ranges_steps_lists_and_throttles_are_read_as_slurm_reads_them() -> None:
    assert array_indices("0-9:4,2,7-8%3") == [0, 2, 4, 7, 8]
    assert task_ids("12_[3-5%2]") == ["12_3", "12_4", "12_5"]
    assert [count_tasks(job_id) for job_id in ("12", "12_3", "12_[3-5%2]", "12_[0-3999999]")] == [1, 1, 3, 4_000_000]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        ("0-4000000000", "largest index that Slurm can take is 4000000"),
        (f"0-{'9' * 5000}", "largest index that Slurm can take is 4000000"),
        ("0-4000000", "4000001 tasks; hpcjobs submits arrays of up to 100000"),
        ("9-1", "is not understood"),
        ("1-2%0", "is not understood"),
    ],
)
def test_an_array_that_is_wrong_or_too_large_is_refused_before_it_is_expanded(array: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        hpcjobs.plan(["true"], site="local", array=array)
