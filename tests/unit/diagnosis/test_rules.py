"""Each rule explains the line that it is made for, and fills in what the line names."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path
from typing import cast

import pytest
from commandline import ok, within

from hpcjobs.diagnosis.failed import EXIT_CODES, SIGNALS, STATES, TRAINER_EXIT_CODES, diagnose
from hpcjobs.diagnosis.log import parse_line
from hpcjobs.diagnosis.matches import find_matches
from hpcjobs.diagnosis.reasons import REASONS
from hpcjobs.diagnosis.rules import RULES, find_required_texts, may_explain
from hpcjobs.diagnosis.rules.system import Rule
from hpcjobs.diagnosis.values import Diagnosis, JobFacts, Kind


def explain(*lines: str, facts: JobFacts | None = None) -> Diagnosis:
    return diagnose(facts or JobFacts(None), [parse_line(line, "job.out", n) for n, line in enumerate(lines, 1)])


CASES = [
    (cause, text)
    for line in (Path(__file__).parents[2] / "data" / "failure_lines.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for cause, _, text in [line.partition(" ")]
]


@pytest.mark.parametrize(("cause", "line"), CASES)
def test_a_line_is_explained_by_its_rule(cause: str, line: str) -> None:
    diagnosis = explain(line)
    is_consequence = any(rule.cause == cause and rule.kind is Kind.CONSEQUENCE for rule in RULES)
    assert diagnosis.cause == (None if is_consequence else cause), diagnosis
    assert diagnosis.line is not None
    assert "{" not in diagnosis.text + "".join(diagnosis.fix)


def test_every_rule_has_a_line_that_tests_it() -> None:
    assert {rule.cause for rule in RULES} <= {cause for cause, _ in CASES}


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3: loss 0.4, accuracy 0.91",
        "INFO: wrote checkpoint to /scratch/run/step-100",
        "0 errors, 3 warnings",
        "no error in 1200 steps",
        "timeout is 600 s",
        "Starting on node12 with MASTER_ADDR=127.0.0.1",
        "retrying the download (attempt 2 of 5)",
        "UserWarning: the number of workers is larger than the number of CPUs",
        "NCCL version 2.21.5+cuda12.4",
        "restored from quota.pt",
    ],
)
def test_a_line_of_a_healthy_run_is_explained_by_no_rule(line: str) -> None:
    assert explain(line).cause is None


def test_what_the_line_names_is_in_the_text_and_in_the_command() -> None:
    diagnosis = explain("ModuleNotFoundError: No module named 'sklearn.svm'")
    assert "sklearn.svm" in diagnosis.text
    assert diagnosis.fix[0].startswith("python -m pip install scikit-learn")


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (JobFacts("7", python="/home/me/venv/bin/python"), "/home/me/venv/bin/python -m pip install scikit-learn"),
        (
            JobFacts("7", python="/home/me/.local/share/hpcjobs/installed/0.1-a.B/bin/python", by_hpcjobs=True),
            "the job ran with /home/me/.local/share/hpcjobs/installed/0.1-a.B/bin/python, the environment of hpcjobs",
        ),
        (JobFacts("7", image="/images/t.sif", by_hpcjobs=True), "add scikit-learn to the recipe of the image /images/"),
    ],
)
def test_a_missing_module_is_installed_where_the_job_looks_for_it(facts: JobFacts, advice: str) -> None:
    """Not by pip into the environment of hpcjobs itself, nor where an image has the program's Python."""
    fix = explain("ModuleNotFoundError: No module named 'sklearn.svm'", facts=facts).fix
    assert fix[0].startswith(advice)
    assert "`environment` (venv or conda)" in fix[1]
    assert (" pip " in "".join(fix)) is ("venv/bin" in advice)


def test_a_command_has_what_the_log_names_as_one_word() -> None:
    """Anybody's program writes the log, and people paste what is advised."""
    fix = explain("FileNotFoundError: [Errno 2] No such file or directory: '/a b;id>c'").fix
    assert shlex.split(fix[0].partition("  # ")[0]) == ["ls", "-l", "/a b;id>c"]


def test_what_the_log_names_is_no_option_of_a_command() -> None:
    fix = explain("slurmstepd: error: execve(): --reference=/etc/shadow: Permission denied").fix
    assert fix[0].startswith("chmod +x PROGRAM ")


def test_no_placeholder_of_a_rule_is_unknown() -> None:
    of_the_job = {*("again", "job", "site", "host", "rank", "nodes", "run_dir", "requested_memory", "more_memory")}
    of_the_job |= {*("python", "time_limit", "more_time", "package", "of_file", "install", "other_python")}
    for rule in RULES:
        own = {name.rstrip("0123456789") for name in rule.pattern.groupindex}
        used = set(re.findall(r"\{(\w+)\}", " ".join((rule.text, *rule.fix))))
        assert used <= of_the_job | own, rule.cause


@pytest.mark.parametrize("line", [line for _, line in CASES])
def test_the_quick_search_passes_every_line_that_a_rule_explains(line: str) -> None:
    assert may_explain(line)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.cause)
def test_the_quick_search_needs_no_list_beside_a_rule(rule: Rule) -> None:
    """Each pattern requires a text that is long enough to be rare: a new rule is one entry."""
    assert min(map(len, find_required_texts(rule.pattern))) > 3


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"out of memory", {"out of memory"}),
        (r"GPU (?:error|failure) \d+", {"error", "failure"}),
        (r"x?(?i:No SPACE) left+", {"no space"}),
        (r"(?P<a>first) .*|second(?: third)?", {"first", "second"}),
        (r"(?!never)[abc]*always(?=ahead)", {"always"}),
    ],
)
def test_a_match_contains_one_of_the_required_texts(pattern: str, texts: set[str]) -> None:
    assert find_required_texts(re.compile(pattern)) == texts


def test_a_pattern_with_an_alternative_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="without a text"):
        find_required_texts(re.compile(r"error|\d+"))


def test_a_line_of_progress_is_passed_over_by_the_quick_search() -> None:
    assert not may_explain("epoch 3, step 1200: throughput 5312 samples/s, lr 0.001")


class CountingPattern:
    """Stands for the pattern of a rule, and counts the characters that are compared with it."""

    def __init__(self) -> None:
        self.characters = 0

    def search(self, text: str) -> None:
        self.characters += len(text)


def test_of_many_long_lines_only_parts_are_compared_with_the_rules() -> None:
    pattern = CountingPattern()
    lines = [parse_line("error: " + "x" * 1300, "job.out", number) for number in range(1, 6001)]
    assert not list(find_matches(lines, [RULES[0]._replace(pattern=cast("re.Pattern[str]", pattern))]))
    assert pattern.characters < 6000 * 600


@pytest.mark.parametrize("lines_behind", [0, 600])
def test_the_cause_at_the_beginning_or_the_end_of_a_very_long_line_is_found(lines_behind: int) -> None:
    behind = [f"[rank1]: waiting {n}" for n in range(lines_behind)]
    for line in (
        "OSError: [Errno 28] No space left on device: 'a.pt' " + "x" * 100_000,
        "RuntimeError: " + "x" * 100_000 + " [Errno 28] No space left on device",
    ):
        assert explain(f"[rank0]: {line}", *behind).cause == "disk-full"


def test_a_line_without_blanks_takes_the_rules_no_longer_than_one_of_words() -> None:
    def seconds(text: str) -> float:
        start = time.process_time()
        for rule in RULES:
            rule.pattern.search(text)
        return time.process_time() - start

    assert min(seconds("x" * 2000) for _ in range(3)) < 5 * min(seconds("xxxxxxx " * 250) for _ in range(3))


def test_colours_and_control_characters_of_a_log_are_taken_out() -> None:
    diagnosis = explain("\x1b[1;31mValueError: bad\x07 batch\x1b[0m")
    assert diagnosis.line is not None
    assert (diagnosis.cause, diagnosis.line.text) == ("python-error", "ValueError: bad batch")


def test_why_of_a_file_names_the_option_that_reads_a_log(here: Path) -> None:
    Path("train.log").write_text("RuntimeError: CUDA out of memory\n")
    answer = within("why", "train.log")
    assert answer.code == 6
    assert "hint: `hpcjobs why --log train.log` explains a log" in answer.err
    assert within("why", "--log", "train.log").code == 0
    Path("7").touch()
    assert "--log 7" not in within("why", "7").err, "7 is a job"
    Path("a b.log").touch()
    assert "hint: `hpcjobs why --log 'a b.log'` explains a log" in within("why", "a b.log").err
    assert within("why", "a" * 300).code == 6


def test_a_log_that_is_a_pipe_is_an_error_and_is_not_waited_for(here: Path) -> None:
    os.mkfifo("pipe")
    answer = within("why", "--log", "pipe")
    assert answer.code == 5
    assert "no regular file" in answer.err


def test_an_error_that_the_program_survived_is_no_evidence_of_the_signal_that_killed_it() -> None:
    survived = ("Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 'x'", "step 1", "step 2")
    diagnosis = explain(*survived, "Killed")
    assert diagnosis.cause == "killed"
    assert not [fact for fact in diagnosis.evidence if "KeyError" in fact.text]


def test_the_end_of_a_large_log_is_read_with_the_numbers_of_its_lines(here: Path) -> None:
    Path("large.log").write_text("step 1\n" * 2_000_000 + "2: ValueError: end\n")
    line = ok("why", "--log", "large.log", "--json").json["line"]
    assert (line["number"], line["rank"]) == (2_000_001, 2)


@pytest.mark.parametrize(
    ("code", "line", "cause"),
    [
        (
            2,
            "error: --workload lmm: there are lm, mnist. Hint: your own is written package.module:function",
            "usage-error",
        ),
        (14, "error: --text /nope.txt: no such file", "file-missing"),
        (17, "error: --resume yes: no manifest. Hint: --resume none starts over", "checkpoint-unusable"),
    ],
)
def test_the_message_of_a_bundled_trainer_is_the_line_and_its_exit_code_the_cause(
    code: int, line: str, cause: str
) -> None:
    diagnosis = explain("step 1", line, facts=JobFacts("L1", exit_code=code, bundled_trainer=True))
    assert diagnosis.cause == cause
    assert diagnosis.line is not None
    assert diagnosis.line.text == line


@pytest.mark.parametrize("clock", ["12:30:46", "12:30:46,001", "03:07"])
def test_the_hour_of_a_line_is_not_the_rank_that_failed(clock: str) -> None:
    diagnosis = explain(f"{clock} ModuleNotFoundError: No module named 'einops'")
    assert (diagnosis.cause, diagnosis.rank) == ("python-module-missing", None)
    assert diagnosis.line is not None
    assert diagnosis.line.text.startswith(clock)


def test_no_comment_of_an_advised_command_has_text_of_others_or_a_command() -> None:
    """An interactive zsh knows no comments: it runs what a pasted line has behind its `#`."""
    ends = [*STATES.values(), *SIGNALS.values(), *EXIT_CODES.values(), *TRAINER_EXIT_CODES.values()]
    fixes = [fix for each in (*RULES, *ends) for fix in each.fix]
    fixes += [reason.fix for reason in REASONS.values() if reason.fix is not None]
    comments = [fix.partition("#")[2] for fix in fixes]
    assert len([comment for comment in comments if comment]) > 60
    assert [comment for comment in comments if re.search(r"[{`$]", comment)] == []


def test_an_advised_command_has_no_text_of_a_log_without_quotes() -> None:
    line = "x: error while loading shared libraries: lib$(id).so: cannot open shared object file"
    diagnosis = explain(line, facts=JobFacts("7", by_hpcjobs=True, site="local"))
    assert "lib$(id).so" in diagnosis.text
    assert [fix for fix in diagnosis.fix if "$(id)" in fix] == []
