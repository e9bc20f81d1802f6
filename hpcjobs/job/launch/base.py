"""The interface of launchers, and how their tokens become a line of shell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcjobs.job.models import Job


class Raw(str):
    """Shell text that stands in a command line as it is; every other token is quoted."""


class Launch(NamedTuple):
    """How the tasks start."""

    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Shell lines, run once by the script before the command."""


class Launcher(NamedTuple):
    """A launcher and the schedulers it works under."""

    build: Callable[[Job], Launch]
    schedulers: tuple[str, ...]


def entering(job: Job) -> tuple[str, ...]:
    """The words before a command that runs it in the job's image; with pyxis srun has entered it already."""
    return () if job.container is None or job.container.runtime == "pyxis" else (Raw('"${_hj_enter[@]}"'),)


def task(job: Job, *, label: bool = False, agents: bool = False) -> tuple[str, ...]:
    """The words before a program that run it as one rank, by ``rank.sh``.

    Args:
        label: the rank goes before each line of output; ``srun --label`` does it otherwise.
        agents: elastic agents start the ranks, and start them again.
    """
    options = ["--label"] if label else []
    if job.min_nodes is not None:
        options.append(f"--min-tasks={job.min_nodes * job.ntasks_per_node}")
    if agents and job.retries is not None:
        options.append(f"--max-errors={job.retries.error}")
    inside = job.container
    if inside is not None and inside.runtime == "pyxis":  # elsewhere enter.sh does it
        options.append(f"--python-path={inside.package_folder}")
    return ("bash", Raw('"$_hj_shell/rank.sh"'), *options, "--")


def command_line(tokens: Sequence[str]) -> str:
    """``tokens`` as one line of shell: the single place where words are quoted."""
    return " ".join(token if isinstance(token, Raw) else shlex.quote(token) for token in tokens)
