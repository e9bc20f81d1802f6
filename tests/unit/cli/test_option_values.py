"""An option whose value is missing does not take the next option for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commandline import ok, within

from hpcjobs.cli import app
from hpcjobs.cli.options import VALUE_OF_BARE


def options_with_values(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each option that has a value, behind its verb; of verbs with sbatch's options only the first name of each."""
    for param in command.params:
        if param.param_type_name == "option" and not param.is_flag and param.opts[0] not in VALUE_OF_BARE:
            yield (*path, param.opts[0])
    context = typer.Context(command)
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from options_with_values(command.get_command(context, name), (*path, name))


EVERY_OPTION = list(options_with_values(typer.main.get_command(app)))


def test_an_option_in_place_of_a_value_is_refused_by_every_verb(here: Path) -> None:
    accepted = [" ".join(arguments) for arguments in EVERY_OPTION if within(*arguments, "--help", "true").code != 2]
    assert len(EVERY_OPTION) > 500
    assert accepted == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "submit -A --dry-run true",
            "'--dry-run' is an option of hpcjobs submit. To pass it as the argument, write --account=--dry-run",
        ),
        ("submit -fA -N 2 true", "Option '-A' requires an argument; '-N' is an option of hpcjobs submit."),
        ("submit --account --nodes=2 true", "'--nodes' is an option of hpcjobs submit."),
        ("submit -A -- true", "Option '-A' requires an argument; '--' begins the program."),
        ("submit --srun --dry-run true", "write --srun=--dry-run"),
        ("sweep run --set --dry-run true", "'--dry-run' is an option of hpcjobs sweep run."),
        ("--remote --debug ps", "Option '--remote' requires an argument; '--debug' is an option of hpcjobs."),
    ],
)
def test_the_message_names_both_options_and_nothing_is_submitted(here: Path, arguments: str, message: str) -> None:
    answer = within(*arguments.split())
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--comment=--dry-run",), "#SBATCH --comment=--dry-run"),
        (("--srun", "--hint=nomultithread"), "--hint=nomultithread"),
        (("-o", "--mail-type=END"), "#SBATCH --mail-type=END"),
        (("--exclusive", "--nodes", "1"), "#SBATCH --exclusive"),
        (("--nice", "-5"), "#SBATCH --nice=-5"),
        (("--comment", "-"), "#SBATCH --comment=-"),
    ],
)
def test_values_that_look_like_options_are_taken_where_they_are_meant(
    here: Path, arguments: tuple[str, ...], line: str
) -> None:
    (here / "wide.yaml").write_text("{partitions: {a: {nodes: 2, node: {cpus: 4, mem: 8G}}}}")
    assert line in ok("submit", "--site", "./wide.yaml", *arguments, "--dry-run", "true", "-A", "--dry-run").out
