"""Help that can be read: verbs in groups, and the options of a job in sections, those that are typed most first."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commandline import ok

from hpcjobs.cli import VERBS
from hpcjobs.cli.options import SECTIONS

REPOSITORY = Path(__file__).parents[3]


def headings(text: str) -> list[str]:
    return re.findall(r"^(\S.*):$", text, re.MULTILINE)


def test_every_verb_stands_in_one_group_of_the_help() -> None:
    out = ok("--help").out
    assert headings(out)[:3] == ["Options", "Submit and follow", "Understand"]
    listed = re.findall(r"^  ([a-z]+) +\S", out.partition("Submit and follow:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(VERBS)


def test_every_option_of_submit_stands_in_one_section_of_its_help() -> None:
    out = ok("submit", "--help").out
    assert headings(out) == ["Arguments", *SECTIONS]
    listed = [name for names in SECTIONS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert all(re.search(rf"^  .*--?{name}\b", out, re.MULTILINE) for name in listed)
    assert len(SECTIONS["Used most"]) == 10


@pytest.mark.parametrize("verb", [("sweep", "run"), ("scale",)])
def test_the_own_options_of_a_verb_come_before_those_of_its_jobs(verb: tuple[str, ...]) -> None:
    assert headings(ok(*verb, "--help").out)[:3] == ["Arguments", "Options", "Used most"]


def test_help_prints_a_page_of_the_documentation_and_lists_the_pages() -> None:
    topics = ok("help", "topics").out
    assert "- **containers**: run a job in an image" in topics
    assert ok("help", "environment").out == (REPOSITORY / "docs/environment.md").read_text()
    assert ok("help", "sites.md").out == (REPOSITORY / "docs/sites.md").read_text()
    assert ok("help", "sweep", "run").out == ok("sweep", "run", "--help").out
    assert "| 70 |" in ok("help", "exit-codes").out


@pytest.mark.parametrize("topic", ["budget", "read_only", "HPCJOBS_BUDGET", "read-only"])
def test_the_limits_of_the_environment_are_a_topic(topic: str) -> None:
    text = ok("help", topic).out
    assert text.startswith("# Limits for agents and scripts\n")
    assert "HPCJOBS_READ_ONLY" in text
    assert "HPCJOBS_BUDGET" in text
    assert "budget, read_only" in ok("help", "topics").out
