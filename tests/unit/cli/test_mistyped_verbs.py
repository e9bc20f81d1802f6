"""A mistyped verb is a usage error that names the nearest one, and no program."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from commandline import within
from test_golden_output import verbs

from hpcjobs.cli import app

EVERY_VERB = list(verbs(typer.main.get_command(app)))


def mistype(verb: str) -> list[str]:
    """The usual slips: two letters swapped, one doubled, one left out."""
    middle = len(verb) // 2
    swapped = verb[: middle - 1] + verb[middle] + verb[middle - 1] + verb[middle + 1 :]
    return [swapped, verb[:middle] + verb[middle - 1 :], verb[:middle] + verb[middle + 1 :]]


@pytest.mark.parametrize("arguments", [arguments for arguments in EVERY_VERB if arguments], ids=" ".join)
def test_a_mistyped_verb_is_an_error_with_the_nearest_name(arguments: tuple[str, ...], here: Path) -> None:
    *group, verb = arguments
    typed = {" ".join(arguments) for arguments in EVERY_VERB}
    for slip in mistype(verb):
        if " ".join([*group, slip]) in typed or slip == verb:
            continue
        answer = within(*group, slip, "true")
        assert (answer.code, answer.out) == (2, ""), answer
        if len(verb) > 2:  # of two letters nothing is left that is near
            assert f"did you mean '{verb}'?" in answer.err, answer
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("typed", "verb"), [("squeue", "ps"), ("run", "submit"), ("scancel", "cancel"), ("status", "show"), ("ls", "ps")]
)
def test_a_verb_of_another_tool_is_answered_with_ours(typed: str, verb: str) -> None:
    answer = within(typed, "7")
    assert (answer.code, answer.out) == (2, "")
    assert f"no command {typed!r}; did you mean {verb!r}? " in answer.err


@pytest.mark.parametrize("arguments", ["sweep train.py", "jupyter notebook", "report 42", "help sweep statsu"])
def test_what_is_no_verb_of_a_group_is_never_run(arguments: str, here: Path) -> None:
    answer = within(*arguments.split())
    assert (answer.code, answer.out) == (2, ""), answer
    assert "known:" in answer.err, answer
