"""Commands that `why`, messages and pages advise: each exists, and is not refused for the job it is printed for."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from commandline import Answer, ok, within
from sample_cluster import SampleCluster

from hpcjobs.cli import app
from hpcjobs.diagnosis import failed
from hpcjobs.diagnosis.failed import fill_fixes, values_of
from hpcjobs.diagnosis.gather import gather_entry
from hpcjobs.diagnosis.reasons import REASONS
from hpcjobs.diagnosis.rules import RULES
from hpcjobs.diagnosis.values import JobFacts
from hpcjobs.run.select import select

EXAMPLES = {"N": "1", "FOLDER": ".", "TWICE_AS_MUCH": "64M", "LONGER": "20", "SHORTER": "5"}
"""What a reader writes in place of a word in capitals."""


def advised() -> list[str]:
    """Each advice about a failure, with its placeholders."""
    ends = [end for table in vars(failed).values() if isinstance(table, dict) for end in table.values()]
    fixes = {fix for each in (*RULES, *ends) for fix in getattr(each, "fix", ())}
    return sorted(fix for fix in fixes if "{again}" in fix or "hpcjobs " in fix)


def commands_of(advice: str) -> Iterator[list[str]]:
    """The commands of hpcjobs in a line of advice, as a reader would type them."""
    for command in re.split(r" ; | && ", advice.partition("  # ")[0]):
        if command.startswith("hpcjobs "):
            yield [EXAMPLES.get(argument, argument) for argument in shlex.split(command)[1:]]


def follow(arguments: Sequence[str]) -> Answer:
    """Run an advised command; the check of nodes is only planned."""
    return within(arguments[0], *(["--dry-run"] if arguments[0] == "fabric" else []), *arguments[1:])


def assert_can_be_followed(facts: JobFacts) -> None:
    values = failed.add_derived(values_of(facts, rank=0, host="n1"))
    refused = {}
    for fix in advised():
        for advice in fill_fixes([fix], values, by_hpcjobs=True):
            for arguments in commands_of(advice):
                if "IMAGE" in arguments:  # the site has none; tests/unit/containers checks images
                    continue
                answer = follow(arguments)
                if answer.code != 0:
                    refused[advice] = answer.err
    assert refused == {}


def test_advice_about_a_failed_job_of_slurm_can_be_followed(cluster: SampleCluster) -> None:
    (entry,) = select(["42"])
    assert_can_be_followed(gather_entry(entry).facts)


def test_advice_about_a_failed_job_of_this_machine_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "1")  # for the advice to request one
    job = ok("submit", "--site", "local", "false").out.split()[1]
    within("wait", job)
    (entry,) = select([job])
    assert_can_be_followed(gather_entry(entry).facts)


def test_advice_about_a_waiting_job_can_be_followed(cluster: SampleCluster) -> None:
    """To leave its dependency out, and to take each place that `where` shows."""
    never = REASONS["DependencyNeverSatisfied"].fix or ""
    rows = [row for row in ok("where", "--site", "mine", "--json", "-t", "10", "train.py").json if row["is_valid"]]
    assert rows
    moves = [f"hpcjobs rerun 45 --partition {row['partition']} --nodes 1 --time 0:10:00" for row in rows]
    commands = [command for fix in (never.format(job="45"), *moves) for command in commands_of(fix)]
    assert [command[0] for command in commands] == ["cancel", "rerun", *["rerun"] * len(rows)]
    for command in commands:
        assert follow(command).code == 0, command


def test_advice_for_each_reason_of_slurm_names_commands_that_exist() -> None:
    for reason in REASONS.values():
        for command in commands_of((reason.fix or "").replace("{job}", "45")):
            parse(command)


def test_the_next_command_after_a_sweep_can_be_followed_whatever_its_name(here: Path) -> None:
    swept = ok("sweep", "run", "--site", "local", "--name", "a b;id", "--set", "i=1", "true").out
    (command,) = commands_of(swept.partition("next: ")[2].strip())
    assert follow(command).code == 0, command


REPOSITORY = Path(__file__).parents[3]
MESSAGES = {"could not be installed there"}
"""Quoted texts that begin with the name of the program, and are no commands."""
_VERB = re.compile(r"[a-z]+$")


def parse(arguments: Sequence[str]) -> None:
    """Read a command line without running it.

    Raises:
        Exception: Typer's error about a verb or option that does not exist.
    """
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="hpcjobs")
    rest = list(arguments)
    while True:
        own = {"--help", *(name for parameter in command.params for name in parameter.opts)}
        if rest and rest[0].startswith("-") and rest[0] not in own and hasattr(command, "commands"):
            rest.insert(0, next(iter(command.commands)))  # sweep --set ... is sweep run
        _, rest, _ = command.make_parser(context).parse_args(rest)
        if not rest or not hasattr(command, "resolve_command") or not _VERB.match(rest[0]):
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, info_name=name, parent=context, **command.context_settings)


def texts_of_the_package() -> Iterator[tuple[str, str]]:
    """Each text of the package with its place; a value within a text is ``X``."""
    for path in (REPOSITORY / "hpcjobs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", node.value


def texts_of_the_pages() -> Iterator[tuple[str, str]]:
    for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        yield str(path.relative_to(REPOSITORY)), re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))


def test_each_command_in_backquotes_exists_with_its_options() -> None:
    """In messages, docstrings, help and pages. Words in capitals and dots stand for what a reader writes."""
    wrong = {}
    for place, text in (*texts_of_the_package(), *texts_of_the_pages()):
        for quoted in re.findall(r"`hpcjobs ([^`]+)`", " ".join(text.split())):
            arguments = quoted.partition("  # ")[0].replace("[", "").replace("]", "").replace("...", "X").split()
            if quoted in MESSAGES or not (_VERB.match(arguments[0]) or arguments[0].startswith("-")):
                continue  # hpcjobs VERB
            try:
                parse(arguments)
            except Exception as error:  # Typer has its own copy of click, without a public name
                if "requires an argument" not in str(error):  # an option that is only named
                    wrong[place, quoted] = str(error)
    assert not wrong, "\n".join(f"{place}: {quoted}: {error}" for (place, quoted), error in wrong.items())
