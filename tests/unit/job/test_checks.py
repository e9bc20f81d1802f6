"""What a program would refuse at its start is refused before anything is queued."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ok, within

import hpcjobs
from hpcjobs import trainers
from hpcjobs.cli.submit import submit
from hpcjobs.errors import RequestError
from hpcjobs.job.program import options_of_submit
from hpcjobs.site.resources import OPTIONS, Treatment
from hpcjobs.trainers.config import check_arguments

HERE = ("--site", "local")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("submit ddp --epoch 3", "ddp: unknown argument '--epoch'\nhint: did you mean --epochs?; --no-check submits"),
        ("submit hpcjobs.trainers.fsdp --epoch 3", "fsdp: unknown argument '--epoch'"),
        ("submit fsdp --epochs many", "fsdp: argument --epochs: 'many' is not a number"),
        ("submit ddp --precision fp3", "argument --precision: invalid choice: 'fp3'"),
        ("submit ddp --workload mnits", "--workload mnits: there are lm, matmul, mnist, resnet50"),
        ("submit ddp --epochs 1 --dry-run", "'--dry-run': it is an option of hpcjobs\nhint: options of hpcjobs come"),
        ("submit ddp --nodes=2", "'--nodes=2': it is an option of hpcjobs"),
        ("submit ddp -N 2", "'-N': it is an option of hpcjobs"),
        ("where ddp --epoch 3", "unknown argument '--epoch'"),
        ("scale ddp --epoch 3", "unknown argument '--epoch'"),
        ("sweep --set epoch=1,2 ddp", "unknown argument '--epoch=1'"),
        ("sweep --set lr=0.1,high ddp", "argument --lr: 'high' is not a number"),
        ("sweep --set rate=0.1,high ddp --lr {rate}", "argument --lr: 'high' is not a number"),
        ("submit no-such-program", "program no-such-program: no such command on this machine"),
        ("submit no_such.module", "no module 'no_such' here"),
    ],
)
def test_a_program_that_would_fail_is_not_queued(here: Path, arguments: str, message: str) -> None:
    verb, *rest = arguments.split()
    answer = within(verb, *HERE, *rest)
    assert (answer.code, message in answer.err + answer.out) == (5, True), answer
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "arguments", ["submit --no-check ddp --epoch 3", "submit --no-check no-such", "sweep --no-check --set epoch=1 ddp"]
)
def test_no_check_escapes(arguments: str) -> None:
    verb, *rest = arguments.split()
    ok(verb, *HERE, "--dry-run", *rest)


@pytest.mark.parametrize(
    "arguments",
    [
        "ddp --epochs 3 --no-probe",
        "ddp --workload my.module:make --width 3",
        "ddp --help",
        "train.py --epoch 3",
        "true",
    ],
)
def test_a_program_that_can_run_passes(here: Path, arguments: str) -> None:
    (here / "train.py").write_text("")
    assert hpcjobs.plan(arguments, "local").job.argv


def test_a_command_that_modules_or_an_image_may_bring_is_not_looked_for(here: Path) -> None:
    site = "{scheduler: local, modules: [gromacs]}"
    (here / "mine.yaml").write_text(site)
    assert hpcjobs.plan("gmx_mpi mdrun", "./mine.yaml").job.argv[0] == "gmx_mpi"


def test_the_help_of_a_trainer_is_printed_and_not_submitted(here: Path) -> None:
    for arguments in (["ddp", "--help"], ["hpcjobs.trainers.fsdp", "--workload", "lm", "-h"]):
        done = subprocess.run(
            [sys.executable, "-m", "hpcjobs", "submit", *HERE, *arguments], capture_output=True, text=True, check=True
        )
        assert "--batch-size" in done.stdout
    assert not (here / "runs").exists()


def test_every_trainer_reads_its_flags_without_torch() -> None:
    code = "import sys\nfor name in ('torch', 'numpy', 'lightning', 'horovod'): sys.modules[name] = None\n"
    code += "from hpcjobs.trainers.config import check_arguments\n"
    code += f"for trainer in {trainers.NAMES}: check_arguments(trainer, ['--epochs', '3'])\n"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert check_arguments("ddp", ["--workload", "lm"]) == "lm"


def test_each_option_of_submit_is_known_as_one() -> None:
    declared = {
        name.split("/")[0]
        for parameter in inspect.signature(submit).parameters.values()
        for option in parameter.annotation.__metadata__
        for name in getattr(option, "param_decls", None) or [f"--{parameter.name.replace('_', '-')}"]
        if name.startswith("--")
    }
    passed = {f"--{o.name}" for o in OPTIONS.values() if o.treatment in (Treatment.PASSED, Treatment.REFUSED)}
    assert declared - passed <= {*options_of_submit(), "--option", "--program", "--as-json"}


@pytest.mark.parametrize(
    ("text", "arguments", "noted"),
    [
        ("", "--dry-run", True),
        ("", "--site tu", True),
        ("", "-N 2", True),
        ("parser.add_argument('--dry-run')", "--dry-run", False),
        ("def main(dry_run: bool = False): ...  # Fire", "--dry-run", False),
        ("add_argument('-N')", "-N 2", False),
        ("", "--epochs 3", False),
    ],
)
def test_options_behind_a_program_that_does_not_have_them_are_named(
    here: Path, text: str, arguments: str, noted: bool
) -> None:
    (here / "train.py").write_text(text)
    answer = ok("submit", *HERE, "--dry-run", "train.py", *arguments.split())
    assert ("comes after the program" in answer.err) is noted, answer
    if noted:
        refused = within("submit", *HERE, "train.py", *arguments.split())
        assert (refused.code, "options of hpcjobs come before the program" in refused.err) == (5, True), refused
        assert not (here / "runs").exists()
        assert within("submit", *HERE, "--no-check", "train.py", *arguments.split()).code == 0


def test_a_command_of_another_language_gets_the_note_for_options_that_only_submit_has() -> None:
    assert "--retries comes after the program" in ok("submit", *HERE, "--dry-run", "true", "--retries", "on").err
    swept = within("sweep", *HERE, "--set", "lr=1", "--dry-run", "true", "--retries", "on")
    assert "--retries comes after the program" in swept.err
    assert "comes after" not in ok("submit", *HERE, "--dry-run", "true", "--output", "x").err


def test_python_gets_the_same_refusal() -> None:
    with pytest.raises(RequestError, match="did you mean --epochs"):
        hpcjobs.plan("ddp --epoch 3", "local")


@pytest.mark.parametrize(
    ("text", "arguments", "noted"),
    [
        ("", "--dry-run", True),
        ("#SBATCH --time=1:00:00", "--time=2h", True),
        ("case $1 in --dry-run) exit;; esac", "--dry-run", False),
        ('prog "$@"', "--time=2h", False),
        ("", "--epochs 3", False),
    ],
)
def test_options_behind_a_batch_script_that_does_not_have_them_are_named(
    here: Path, text: str, arguments: str, noted: bool
) -> None:
    """A job that was to be shown only is submitted: to the user that must not be silent."""
    (here / "mine.yaml").write_text("partitions: {cpu: {nodes: 4, node: {cpus: 4, mem: 8G}}}\n")
    (here / "job.sbatch").write_text(f"#!/bin/bash\n#SBATCH -N1\n{text}\n")
    answer = ok("submit", "--site", "./mine.yaml", "--dry-run", "job.sbatch", *arguments.split())
    assert ("comes after the program" in answer.err) is noted, answer
