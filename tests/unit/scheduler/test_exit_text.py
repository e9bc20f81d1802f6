"""How an end is put into words."""

from __future__ import annotations

import pytest

from hpcjobs.scheduler.base import JobRecord, State, describe_exit, signal_of


@pytest.mark.parametrize(
    ("exit_code", "signal", "text"),
    [
        (3, None, "exit code 3"),
        (0, 9, "killed by signal 9 (SIGKILL), often out of memory"),
        (137, None, "killed by signal 9 (SIGKILL), often out of memory"),
        (143, None, "killed by signal 15 (SIGTERM)"),
        (139, None, "killed by signal 11 (SIGSEGV), a memory error in compiled code"),
        (255, None, "exit code 255"),
        (0, 125, "killed by Slurm, out of memory"),
        (0, 100, "killed by signal 100"),
        (None, None, ""),
    ],
)
def test_a_signal_is_named_whether_slurm_or_a_shell_reports_it(
    exit_code: int | None, signal: int | None, text: str
) -> None:
    assert describe_exit(exit_code, signal) == text


def test_the_signal_that_ends_a_cancelled_job_has_no_other_cause() -> None:
    record = JobRecord("1", State.CANCELLED, "sacct", exit_code=0, signal=9)
    assert record.ending == ["killed by signal 9 (SIGKILL)"]


def test_an_exit_code_below_128_is_no_signal() -> None:
    assert signal_of(9) is None
