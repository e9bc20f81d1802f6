"""What a user should know of a plan before it is submitted, although nothing is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcjobs.data import shipped
from hpcjobs.job.models import Job
from hpcjobs.job.program import misspelt_trainer
from hpcjobs.job.script import SUFFIX, template_folders


def notes(job: Job) -> Iterator[str]:
    """One line each: nodes left out, a template that replaces a shipped one, a command that is not here."""
    for node, why in job.left_out.items():
        yield f"leaves out {node}: {why}; hpcjobs nodes --clear {node} forgets it"
    if (path := _shadowing_template(job.template)) is not None:
        yield f"template {path} is used in place of the one that comes with hpcjobs"
    if (trainer := misspelt_trainer(job.argv[0])) is not None:
        yield f"no command {job.argv[0]!r} here: the nodes must have it (the trainer is called {trainer!r})"


def _shadowing_template(name: str) -> Path | None:
    """The user's own template of a name that hpcjobs ships too; a checkout of hpcjobs has the shipped ones itself."""
    files = [folder / f"{name}{SUFFIX}" for folder in template_folders()]
    if not (shipped("templates") / f"{name}{SUFFIX}").is_file():
        return None
    used = next(path for path in files if path.is_file())
    return None if used.samefile(files[-1]) else used
