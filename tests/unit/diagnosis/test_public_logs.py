"""Logs of failures, rewritten from public reports or made up in their style: explained, called likely, or unknown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcjobs.diagnosis.failed import diagnose
from hpcjobs.diagnosis.gather import gather_log

LOGS = sorted((Path(__file__).parents[2] / "data" / "failure_logs").glob("*.log"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_log_is_explained_with_rank_and_host_and_doubt_is_named(log: Path) -> None:
    header = dict(re.findall(r"^# (\w+): (.*)$", log.read_text(encoding="utf-8"), re.MULTILINE))
    subject = gather_log(log)
    answer = diagnose(subject.facts, subject.lines)
    shown = {"cause": answer.cause, "rank": answer.rank, "host": answer.host}
    expected = {key: None if header[key] == "-" else header[key] for key in shown}
    assert {key: None if value is None else str(value) for key, value in shown.items()} == expected, answer
    assert header.get("certain") in (None, "yes" if answer.certain else "no"), answer


def test_there_are_at_least_ten_of_them() -> None:
    assert len(LOGS) >= 10
