"""Notes for the user on a valid plan before it is submitted, such as options without effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hpcjobs.data import data_folder
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.job.program import misspelt_trainer, options_of_submit
from hpcjobs.job.script import SUFFIX, template_folders
from hpcjobs.site.resources import LocalEffect, fields_where

_LAUNCHERS = frozenset(("srun", "salloc", "sbatch", "mpirun", "mpiexec", "torchrun", "accelerate", "deepspeed"))
_LETTERS_OF_SLURM = frozenset(("-N", "-G"))
_OF_MANY = frozenset(
    (
        *("--name", "--env", "--time", "--json", "--output", "--comment", "--profile", "--wait", "--follow", "--site"),
        *("--exclude", "--exclusive", "--network", "--power", "--priority", "--signal", "--prefer", "--spec"),
    )
)
"""Options of submit that many a program has too, which may be written in any language."""


def notes(job: Job) -> Iterator[str]:
    """One line each: options without effect, nodes left out, a template in a shipped one's place, a missing command."""
    if job.scheduler == "local" and (without_effect := [job.describe_option(field) for field in _unused_locally(job)]):
        yield f"{', '.join(without_effect)}: no effect on site {job.site}, which is this machine alone"
    yield from job.messages
    for node, why in job.left_out.items():
        yield f"leaves out {node}: {why}; hpcjobs nodes --clear {node} forgets it"
    yield from _options_of_script(job)
    yield from _own_checkpoints(job)
    for arg, _ in _options_after_program(job):
        yield f"warning: {arg} comes after the program, which gets it; options of submit come before the program"
    if (path := _shadowing_template(job.template)) is not None:
        yield f"template {path} is used in place of the one that comes with hpcjobs"
    if (trainer := misspelt_trainer(job.argv[0])) is not None:
        yield f"no command {job.argv[0]!r} on this machine; the nodes must have it (the trainer is {trainer!r})"


def _unused_locally(job: Job) -> list[str]:
    """Options of the user that a local job does without; a partition that the site file has gives it defaults."""
    noted = fields_where("local", LocalEffect.NOTED)
    given = [field for field in noted if getattr(job.resources, field) not in (None, False)]
    used = any(source.startswith("partition ") for source in job.sources.values())
    of_user = [field for field in given if not job.sources.get(field, "site").startswith(("site", "partition "))]
    return [field for field in of_user if field != "partition" or not used]


def _options_of_script(job: Job) -> Iterator[str]:
    """What a batch script names and hpcjobs does otherwise."""
    if job.batch_script is None:
        return
    for field in ("output", "error"):
        if field in job.sources:
            yield f"--{field} ({job.sources[field]}) is left out: `hpcjobs logs` prints the output, of the run folder"


def _own_checkpoints(job: Job) -> Iterator[str]:
    """A script that is started again and does not use hpcjobs, which would find its last checkpoint."""
    if job.retries is None:
        return
    text = _source(job) if job.batch_script is None else job.batch_script.decode(errors="replace")
    if text is not None and "hpcjobs" not in text:
        yield (
            f"retries start {job.name} again with the same arguments: it must find its last checkpoint itself "
            "(docs/own_scripts.md)"
        )


def refuse_options_after_program(job: Job) -> None:
    """Refuse options of submit among the arguments of a file that has none of these names: the job would lack them.

    Raises:
        RequestError: there are some, and the request does not say ``no_check``.
    """
    if any(layer.spec.no_check for layer in job.layers):
        return
    if typed := [arg for arg, is_file in _options_after_program(job) if is_file]:
        raise RequestError(
            f"{' '.join(typed)} after the program: the program, which would get it, does not have it",
            hint="options of hpcjobs come before the program; --no-check submits the command as it is",
        )


def _options_after_program(job: Job) -> Iterator[tuple[str, bool]]:
    """Options of submit among the arguments of a program that does not seem to have them.

    With each, whether the program is a file that was searched for the option, and leaves its arguments to a parser.
    """
    if job.argv[0] in _LAUNCHERS:
        return
    arguments = job.argv[1:]
    of_submit = options_of_submit() | _LETTERS_OF_SLURM
    typed = [arg for arg in arguments if arg.startswith("-") and arg.partition("=")[0] in of_submit]
    if not typed or any(arg.startswith("hpcjobs.trainers.") for arg in arguments[:4]):  # those were checked
        return
    text = _source(job) if job.batch_script is None else _source_of_batch(job.batch_script)
    for arg in typed:
        name = arg.partition("=")[0]
        common = _OF_MANY if job.argv[0] == job.python and job.batch_script is None else _OF_MANY | _LETTERS_OF_SLURM
        unknown = name not in common if text is None else not _mentions(text, name)
        if unknown:
            yield arg, text is not None and "argv" not in text


def _source(job: Job) -> str | None:
    """The text of a program that is one file of Python; None: another kind of program."""
    python, *args = job.argv
    file = Path(job.chdir, args[1]) if python == job.python and len(args) > 1 else None
    if file is None or file.suffix != ".py" or not file.is_file():
        return None
    return file.read_text(encoding="utf-8", errors="replace")


def _source_of_batch(script: bytes) -> str | None:
    """The text of a batch script without its #SBATCH lines; None: it hands its arguments on to another program."""
    text = script.decode(errors="replace")
    if "$@" in text or "$*" in text:
        return None
    return "\n".join(line for line in text.splitlines() if not line.startswith("#SBATCH"))


def _mentions(text: str, option: str) -> bool:
    """Whether a program seems to have the option: by its text, or, as Fire does it, by a parameter's name."""
    if not option.startswith("--"):
        return f'"{option}"' in text or f"'{option}'" in text
    return option in text or re.search(rf"\b{option[2:].replace('-', '_')}\s*[:=]", text) is not None


def _shadowing_template(name: str) -> Path | None:
    """The user's own template of a name that hpcjobs ships too; a checkout of hpcjobs has the shipped ones itself."""
    files = [folder / f"{name}{SUFFIX}" for folder in template_folders()]
    if not (data_folder("templates") / f"{name}{SUFFIX}").is_file():
        return None
    used = next(path for path in files if path.is_file())
    return None if used.samefile(files[-1]) else used
