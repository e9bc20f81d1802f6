"""Logs of failures with what `hpcjobs why` may answer, several in one file of tests/data/failure_cases.

Each begins with `=== NAME` and a header: `# cause:` the right ones (`-`: unknown), `# certain:` any, or `no`; `# rank:`
and `# host:` (`-`: none, `*`: any); `# state:` and `# exit:` what Slurm recorded; `# not:` a word that the advice must
not have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpcjobs.diagnosis.failed import diagnose
from hpcjobs.diagnosis.gather import gather_log
from hpcjobs.diagnosis.values import Diagnosis, JobFacts

FOLDER = Path(__file__).parents[2] / "data" / "failure_cases"


@dataclass(frozen=True)
class Case:
    name: str
    header: dict[str, str]
    text: str

    @property
    def causes(self) -> set[str]:
        return set(self.header["cause"].split(" | "))


@dataclass(frozen=True)
class Verdict:
    case: Case
    answer: Diagnosis
    mark: str
    """``right``, ``unknown`` (honest), ``wrong``, or ``certain`` (wrong, or only likely, and said with certainty)."""
    errors: tuple[str, ...]


def read_cases(name: str) -> list[Case]:
    cases = []
    for block in re.split(r"^=== ", (FOLDER / f"{name}.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, rest = block.partition("\n")
        lines = rest.split("\n")
        count = next(n for n, line in enumerate(lines) if not re.match(r"# \w+: ", line))
        header = dict(line[2:].split(": ", 1) for line in lines[:count])
        cases.append(Case(title.strip(), header, "\n".join(lines[count:])))
    return cases


def judge(case: Case, folder: Path) -> Verdict:
    log = folder / f"{case.name}.log"
    log.write_text(case.text, encoding="utf-8")
    subject = gather_log(log)
    answer = diagnose(_facts(case, subject.facts), subject.lines)
    shown = answer.cause or "-"
    if shown in case.causes:
        mark = "certain" if answer.certain and case.header.get("certain") == "no" else "right"
    else:
        mark = "unknown" if answer.cause is None else "certain" if answer.certain else "wrong"
    errors = []
    for key, value in (("rank", answer.rank), ("host", answer.host)):
        if case.header[key] != "*" and str("-" if value is None else value) != case.header[key]:
            errors.append(f"{key} {value} instead of {case.header[key]}")
    if (refused := case.header.get("not")) is not None and any(refused in fix for fix in answer.fix):
        errors.append(f"advises {refused}: {answer.fix}")
    return Verdict(case, answer, mark, tuple(errors))


def _facts(case: Case, facts: JobFacts) -> JobFacts:
    if "state" not in case.header:
        return facts
    code, _, signal = case.header.get("exit", "0:0").partition(":")
    state = case.header["state"]
    return JobFacts("77", state=state, source="sacct", exit_code=int(code), signal=int(signal) or None, logs=facts.logs)
