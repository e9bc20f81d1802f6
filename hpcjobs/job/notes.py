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

_LAUNCHERS = frozenset(("srun", "salloc", "sbatch", "mpirun", "mpiexec", "torchrun"))
_SLURM_ONLY = frozenset(
    ("--nodes", "--ntasks", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--partition", "--qos")
)
_IN_PYTHON = frozenset(("-N", "-G", "--gres", "--mem", "--time", "--account"))
"""Also refused by nearly every training script."""


def notes(job: Job) -> Iterator[str]:
    """One line each: options without effect, nodes left out, a template in a shipped one's place, a missing command."""
    if job.scheduler == "local" and (without_effect := [job.asked(field) for field in _unused_locally(job)]):
        yield f"{', '.join(without_effect)}: no effect on site {job.site}, which is this machine alone"
    for node, why in job.left_out.items():
        yield f"leaves out {node}: {why}; hpcjobs nodes --clear {node} forgets it"
    yield from _options_of_script(job)
    yield from _options_after_program(job)
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


def _options_of_script(job: Job) -> Iterator[str]:
    """What a batch script names and hpcjobs does otherwise."""
    if job.batch_script is None:
        return
    for field in ("output", "error"):
        if field in job.sources:
            yield f"--{field} ({job.sources[field]}) is left out: `hpcjobs logs` prints the output, of the run folder"


def _options_after_program(job: Job) -> Iterator[str]:
    """Options of Slurm among the arguments of a program that has no use for them, as far as anybody can tell."""
    if job.batch_script is not None or job.argv[0] in _LAUNCHERS:
        return
    names = _SLURM_ONLY | (_IN_PYTHON if job.argv[0] == job.python else frozenset())
    for word in job.argv[1:]:
        if word.partition("=")[0] in names:
            yield f"{word} stands after the program and is an argument of it; options of submit stand before it"


def _shadowing_template(name: str) -> Path | None:
    """The user's own template of a name that hpcjobs ships too; a checkout of hpcjobs has the shipped ones itself."""
    files = [folder / f"{name}{SUFFIX}" for folder in template_folders()]
    if not (shipped("templates") / f"{name}{SUFFIX}").is_file():
        return None
    used = next(path for path in files if path.is_file())
    return None if used.samefile(files[-1]) else used
