"""Errors of CUDA and NCCL in a log are named, and the commands for them are those of the trainers."""

from __future__ import annotations

import pytest
from gpu_error_texts import COUNTERS, GpuErrorText, read_texts

from hpcjobs.diagnosis.failed import diagnose
from hpcjobs.diagnosis.log import parse_line
from hpcjobs.diagnosis.values import Diagnosis, JobFacts


def explain(text: str, facts: JobFacts | None = None) -> Diagnosis:
    return diagnose(
        facts or JobFacts(None), [parse_line(line, "job.out", n) for n, line in enumerate(text.split("\n"), 1)]
    )


@pytest.mark.parametrize("error", read_texts(), ids=lambda error: f"{error.effect}-{error.message[-30:]}")
def test_why_names_the_cause_of_each_error_at_the_end_of_a_traceback(error: GpuErrorText) -> None:
    log = f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n{error.text}'
    diagnosis = explain(log)
    assert diagnosis.cause == error.cause, diagnosis
    assert diagnosis.line is not None
    assert "--mem" not in " ".join(diagnosis.fix)
    if error.effect == "error":
        assert "--exclude" not in " ".join(diagnosis.fix)


@pytest.mark.parametrize(("code", "cause"), [(12, "out-of-memory"), (22, "gpu-broken"), (23, "gpu-configuration")])
def test_the_trainers_exit_codes_name_the_cause_where_the_log_does_not(code: int, cause: str) -> None:
    facts = JobFacts("7", state="FAILED", exit_code=code, bundled_trainer=True, nodes=("n1",))
    assert explain("step 3", facts).cause == cause


def test_the_lost_rank_is_a_consequence_of_the_broken_gpu_that_another_rank_reports() -> None:
    log = (
        "0: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
        "1: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    assert explain(log).cause == "gpu-broken"


def test_counters_of_errors_that_are_zero_are_no_error() -> None:
    log = f"{COUNTERS}\nTraceback (most recent call last):\n  File 'train.py', line 7\nValueError: no such column"
    assert explain(log).cause == "python-error"
