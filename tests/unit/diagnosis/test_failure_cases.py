"""`hpcjobs why` on many logs as they look in the wild: right, or honest about what it does not know."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from failure_cases import FOLDER, Case, judge, read_cases

from hpcjobs.diagnosis.failed import SIGNALS
from hpcjobs.diagnosis.log import find_end, read_lines
from hpcjobs.scheduler.base import signal_of

CASES = {f"{path.stem}/{case.name}": case for path in sorted(FOLDER.glob("*.txt")) for case in read_cases(path.stem)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_no_wrong_cause_is_named_with_certainty_and_no_wrong_rank_host_or_advice(case: Case, tmp_path: Path) -> None:
    verdict = judge(case, tmp_path)
    assert verdict.mark != "certain", verdict.answer
    assert not verdict.errors, verdict.answer


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cause_first_failure_and_exit_do_not_contradict_each_other(case: Case, tmp_path: Path) -> None:
    """The exit is the one that srun reports of the named rank, and a signal that killed is the one of the exit."""
    answer = judge(case, tmp_path).answer
    if (answer.exit_code or 0) > 128 and answer.exit_code != 174:  # Intel's Fortran after any signal
        assert signal_of(answer.exit_code, None) == answer.signal, answer
    killed = {end.cause: number for number, end in SIGNALS.items()}
    if answer.cause in killed and answer.line is None:
        assert answer.signal == killed[answer.cause], answer
    end = None if answer.rank is None else find_end(read_lines(tmp_path / f"{case.name}.log"), answer.rank)
    if end is not None and answer.host is not None:
        assert (end.host, end.exit_code) == (answer.host, answer.exit_code), answer
        assert end.signal in (None, answer.signal), answer
    named = [each for each in answer.evidence if each.text.startswith("first failure: rank ")]
    assert all(each.text.startswith(f"first failure: rank {answer.rank}") for each in named), answer


def test_at_most_one_log_of_twenty_is_explained_wrongly_and_few_not_at_all(tmp_path: Path) -> None:
    marks = Counter(judge(case, tmp_path).mark for case in CASES.values())
    assert sum(marks.values()) >= 60
    assert (marks["wrong"] + marks["certain"]) * 20 <= sum(marks.values()), marks
    assert marks["unknown"] * 20 <= sum(marks.values()), marks
