"""What a user should know of a plan before it is submitted, although nothing is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcjobs.data import shipped
from hpcjobs.job.models import Job
from hpcjobs.job.program import misspelt_trainer
from hpcjobs.job.script import SUFFIX, template_folders

_CLUSTER_ONLY = (
    *("partition", "account", "qos", "reservation", "priority", "nice", "time_min", "oversubscribe"),
    *("constraint", "prefer", "nodelist", "exclude", "switches", "contiguous", "spread_job", "tmp"),
    *("mail_type", "mail_user"),
)
"""Options that choose among the nodes and queues of a cluster, or that only a cluster can act on."""


def notes(job: Job) -> Iterator[str]:
    """One line each: options without effect, nodes left out, a template in a shipped one's place, a missing command."""
    if job.scheduler == "local" and (without_effect := [job.asked(field) for field in _unused_locally(job)]):
        yield f"{', '.join(without_effect)}: no effect on site {job.site}, which is this machine alone"
    for node, why in job.left_out.items():
        yield f"leaves out {node}: {why}; hpcjobs nodes --clear {node} forgets it"
    if (path := _shadowing_template(job.template)) is not None:
        yield f"template {path} is used in place of the one that comes with hpcjobs"
    if (trainer := misspelt_trainer(job.argv[0])) is not None:
        yield f"no command {job.argv[0]!r} here: the nodes must have it (the trainer is called {trainer!r})"


def _unused_locally(job: Job) -> list[str]:
    """Options of the user that a local job does without; a partition that the site file has gives it defaults."""
    given = [field for field in _CLUSTER_ONLY if getattr(job.resources, field) not in (None, False)]
    used = any(source.startswith("partition ") for source in job.sources.values())
    of_user = [field for field in given if not job.sources.get(field, "site").startswith(("site", "partition "))]
    return [field for field in of_user if field != "partition" or not used]


def _shadowing_template(name: str) -> Path | None:
    """The user's own template of a name that hpcjobs ships too; a checkout of hpcjobs has the shipped ones itself."""
    files = [folder / f"{name}{SUFFIX}" for folder in template_folders()]
    if not (shipped("templates") / f"{name}{SUFFIX}").is_file():
        return None
    used = next(path for path in files if path.is_file())
    return None if used.samefile(files[-1]) else used
