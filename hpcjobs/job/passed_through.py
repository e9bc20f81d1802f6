"""Checks the options that hpcjobs passes to sbatch and srun unread: which of them it refuses, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcjobs.errors import RequestError
from hpcjobs.job.launch import launch
from hpcjobs.job.models import Job
from hpcjobs.site.sbatch import Treatment, find_option

PASSED_THROUGH = ("sbatch", "srun")
"""Fields of `JobSpec` that every layer adds to."""
_NAME = re.compile(r"[a-z][a-z0-9-]*\Z", re.ASCII)
_OF_LAUNCH = frozenset(
    ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "label", "multi-prog", "het-group", "jobid", "job-name")
)
"""Options of srun that the layout of the tasks needs as they are."""
_STREAMS = frozenset(("output", "error", "input"))


def check_passed_through(field: str, options: Sequence[str], source: str) -> None:
    """Refuse what is no option, has an option of hpcjobs, or would break what hpcjobs does with the job.

    Raises:
        RequestError: names the option and what to use.
    """
    for option in options:
        text = f"{field} {option!r} ({source})"
        name = option.removeprefix("--").partition("=")[0]
        if not _NAME.match(name) or any(ord(char) < 32 for char in option):
            raise RequestError(f"{text}: no option", hint=f"NAME=VALUE, by {field}'s long names")
        if field == "sbatch":
            _check_sbatch(text, name)
        elif name in _OF_LAUNCH:
            raise RequestError(f"{text}: the job's own layout sets it", hint="name it as an option of the job")
        elif name in _STREAMS:
            raise RequestError(f"{text}: hpcjobs logs shows the output of the tasks; they read no input")


def _check_sbatch(text: str, name: str) -> None:
    known = find_option(name)
    if known is None or known.treatment is Treatment.PASSED:
        return
    if known.treatment is Treatment.REFUSED:
        raise RequestError(f"{text} is not passed through", hint=known.reason)
    raise RequestError(
        f"{text}: hpcjobs has this option itself", hint=f"use --{known.name}, or {known.field} in a file"
    )


def check_srun(job: Job) -> None:
    """Refuse options for an srun that the job's launcher does not start.

    Raises:
        RequestError: there are some.
    """
    if job.srun and job.scheduler == "slurm" and launch(job).command[0] != "srun":
        source = job.sources.get("srun", f"site {job.site}")
        raise RequestError(
            f"srun {', '.join(job.srun)} ({source}): launcher {job.launcher} starts the tasks without srun"
        )
