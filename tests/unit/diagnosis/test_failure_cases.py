"""`hpcjobs why` on many logs as they look in the wild: right, or honest about what it does not know."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from failure_cases import FOLDER, Case, judge, read_cases

CASES = {f"{path.stem}/{case.name}": case for path in sorted(FOLDER.glob("*.txt")) for case in read_cases(path.stem)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_no_wrong_cause_is_named_with_certainty_and_no_wrong_rank_host_or_advice(case: Case, tmp_path: Path) -> None:
    verdict = judge(case, tmp_path)
    assert verdict.mark != "certain", verdict.answer
    assert not verdict.errors, verdict.answer


def test_at_most_one_log_of_twenty_is_explained_wrongly_and_few_not_at_all(tmp_path: Path) -> None:
    marks = Counter(judge(case, tmp_path).mark for case in CASES.values())
    assert sum(marks.values()) >= 60
    assert (marks["wrong"] + marks["certain"]) * 20 <= sum(marks.values()), marks
    assert marks["unknown"] * 20 <= sum(marks.values()), marks
