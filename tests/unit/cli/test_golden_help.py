"""The help of every verb, and the message of every common mistake, as recorded text of 80 columns.

``GOLDEN=write`` records anew; read the difference.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commandline import Answer, within
from sample_cluster import SampleCluster

from hpcjobs.cli import app

RECORDED = Path(__file__).parents[2] / "data"
ROOT = typer.main.get_command(app)


def commands(command: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The command and all below it, without hidden ones."""
    yield names
    if hasattr(command, "list_commands"):
        context = command.make_context("hpcjobs", ["x"], resilient_parsing=True)
        for name in command.list_commands(context):
            if not (below := command.get_command(context, name)).hidden:
                yield from commands(below, (*names, name))


HELP = {"_".join(("hpcjobs", *names)): names for names in commands(ROOT)}

MISTAKES = {
    "a_verb_of_slurm": "squeue",
    "a_mistyped_verb": "submti train.py",
    "a_mistyped_option": "submit --nods 2 train.py",
    "an_option_without_its_value": "submit -N",
    "no_program": "submit",
    "a_program_that_is_not_there": "submit no_such.py",
    "an_option_behind_the_program": "submit train.py -N 2",
    "an_unknown_site": "submit --site min train.py",
    "an_unknown_partition": "submit --site mine -p gpus train.py",
    "too_many_nodes": "submit --site mine -N 9 train.py",
    "too_many_tasks": "submit --site mine -N 1 --ntasks-per-node 999 train.py",
    "too_long": "submit --site mine -t 90-0 train.py",
    "too_much_memory": "submit --site mine --mem 9T train.py",
    "gpus_that_are_not_there": "submit --site mine --gpus-per-node 8 train.py",
    "a_time_that_is_none": "submit --site mine -t soon train.py",
    "a_size_that_is_none": "submit --site mine --mem lots train.py",
    "a_number_that_is_none": "submit --site mine -N two train.py",
    "an_array_that_is_none": "submit --site mine --array 1--2 train.py",
    "a_launcher_that_is_none": "submit --site mine --launcher mpi train.py",
    "retries_that_are_none": "submit --site mine --retries maybe train.py",
    "an_image_that_is_not_there": "submit --site mine --container no_such.sif train.py",
    "an_option_of_sbatch_that_is_refused": "submit --site mine --output log.txt train.py",
    "two_sites": "submit --site mine --site other train.py",
    "a_job_that_is_unknown": "show 999",
    "a_log_of_an_unknown_job": "logs 999",
    "waiting_for_an_unknown_job": "wait 999",
    "cancelling_an_unknown_job": "cancel 999",
    "cancelling_nothing_named": "cancel",
    "a_reason_of_an_unknown_job": "why 999",
    "a_job_that_is_no_id": "show 12x",
    "a_rank_that_is_none": "logs 42 --rank x",
    "updating_without_a_value": "update 42 time",
    "updating_an_unknown_key": "update 42 tiem=2h",
    "diff_of_one": "diff 42",
    "a_sweep_without_parameters": "sweep run train.py",
    "a_parameter_without_values": "sweep run --set lr train.py",
    "an_unknown_sweep": "sweep status nothing",
    "results_of_an_unknown_sweep": "sweep results nothing",
    "a_study_of_no_size": "scale -N 0 train.py",
    "an_unknown_study": "report scaling nothing",
    "advice_about_nothing": "report advise 999",
    "a_period_that_is_none": "report jobs --since yesteryear",
    "an_unknown_site_shown": "sites show nothing",
    "an_unknown_site_checked": "sites check nothing",
    "a_file_that_is_no_image": "container check train.py",
    "an_unknown_image": "container build nothing",
    "a_notebook_that_is_not_there": "jupyter open 999",
    "a_shell_on_nothing": "shell 999",
    "a_program_on_nothing": "exec 999 hostname",
    "an_unknown_drill": "drill earthquake train.py",
    "an_unknown_cloud": "cloud render nothing",
    "an_unknown_shell": "completion tcsh",
    "an_unknown_topic": "help nothing",
    "an_unknown_schema": "skill --schema nothing",
}


def readable(text: str) -> str:
    return text.replace(str(Path(__file__).parents[3]), "REPOSITORY")


def compare(path: Path, names: tuple[str, ...], answer: Answer, cluster: SampleCluster | None = None) -> None:
    parts = [f"$ {shlex.join(('hpcjobs', *names))}\n", f"exit code {answer.code}\n", answer.out, answer.err]
    text = readable("".join(parts))
    text = cluster.as_recorded(text) if cluster else text
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "GOLDEN=write records it anew"


@pytest.mark.parametrize("name", HELP)
def test_the_help_of_a_command_is_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = (*HELP[name], "--help")
    answer = within(*names)
    assert max(map(len, answer.out.splitlines())) <= 80 or "These options of sbatch" in answer.out
    compare(RECORDED / "golden_help" / f"{name}.txt", names, answer)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_of_a_mistake_is_as_recorded(
    name: str, cluster: SampleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names what was asked and what to do, and what the scheduler said is not needed to understand it."""
    monkeypatch.setenv("COLUMNS", "80")
    names = tuple(MISTAKES[name].split())
    answer = within(*names)
    assert answer.code not in (0, 1, 70), answer
    assert "Traceback" not in answer.err
    assert re.search(r"(?m)^(?:hpcjobs|Error): ", answer.err), answer
    compare(RECORDED / "golden_errors" / f"{name}.txt", names, answer, cluster)


def test_nothing_else_is_recorded() -> None:
    assert {path.stem for path in (RECORDED / "golden_help").iterdir()} == set(HELP)
    assert {path.stem for path in (RECORDED / "golden_errors").iterdir()} == set(MISTAKES)
