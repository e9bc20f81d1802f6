"""HPCJOBS_READ_ONLY: an environment, such as that of an agent, that asks about jobs and changes none."""

from __future__ import annotations

import os

from hpcjobs.errors import RequestError

VARIABLE = "HPCJOBS_READ_ONLY"


def refuse_change(what: str) -> None:
    """Called by whatever is about to have a scheduler ``submit`` or ``cancel`` jobs, or the like.

    Raises:
        RequestError: the environment is read-only.
    """
    if value := os.environ.get(VARIABLE):
        raise RequestError(
            f"{what}: refused, because {VARIABLE}={value} is set: nothing is submitted or changed here",
            hint=f"unset {VARIABLE}; verbs that only ask (ps, show, logs, why, report), and --dry-run, work with it",
        )
