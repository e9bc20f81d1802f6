"""What a launcher says, and how its words become a line of shell."""

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
    ranks: tuple[str, ...] = ()
    """Shell lines, run in each task, that set RANK and its kin."""
    before: tuple[str, ...] = ()
    """Shell lines, run once by the script before the command."""
    after: tuple[str, ...] = ()
    """Shell lines, run once by the script at every end it can notice."""
    agent: str | None = None
    """Command run once per node, which starts the tasks there (an elastic agent, say)."""
    label: bool = False
    """The task itself puts ``RANK: `` before each line it prints; ``srun --label`` does it otherwise."""


class Launcher(NamedTuple):
    """A launcher and the schedulers it works under."""

    build: Callable[[Job], Launch]
    schedulers: tuple[str, ...]


def entering(job: Job) -> tuple[str, ...]:
    """The words before a command that runs it in the job's image; with pyxis srun has entered it already."""
    return () if job.container is None or job.container.runtime == "pyxis" else ENTER


TASK = ("bash", "-c", Raw('"$task"'), "task")
AGENT = ("bash", "-c", Raw('"$agent"'), "agent")
ENTER = ("bash", "-c", Raw('"$enter"'), "enter")


def command_line(tokens: Sequence[str]) -> str:
    """``tokens`` as one line of shell: the single place where words are quoted."""
    return " ".join(token if isinstance(token, Raw) else shlex.quote(token) for token in tokens)
