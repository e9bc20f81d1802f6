"""Reads a user's settings of sbatch from environment variables: they override the site, but not the job's options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.site.models import Resources
from hpcjobs.site.type_errors import in_plain_words

VARIABLES = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CPUS_PER_GPU": "cpus_per_gpu",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus_per_node",
    "SBATCH_GPUS_PER_TASK": "gpus_per_task",
    "SBATCH_GRES": "gres",
    "SBATCH_HINT": "hint",
    "SBATCH_MEM_PER_CPU": "mem_per_cpu",
    "SBATCH_MEM_PER_GPU": "mem_per_gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}
"""What users set for all their jobs. sbatch does not get the variables: there they would win over the script."""


_OF_REAL_CLUSTER = ("account", "reservation", "wckey")
"""A sandbox that plays the site does not know a user's own."""


def user_settings(environ: Mapping[str, str], *, rehearsal: bool) -> Iterator[Layer]:
    """One layer per variable that is set.

    Raises:
        RequestError: a value that the option cannot have.
    """
    for variable, field in VARIABLES.items():
        value = environ.get(variable)
        if not value or (rehearsal and field in _OF_REAL_CLUSTER):
            continue
        try:
            resources = msgspec.convert({field: value}, Resources, strict=False)
        except msgspec.ValidationError as error:
            problem = in_plain_words(str(error).partition(" - at `$.")[0])
            raise RequestError(f"{variable}={value!r} (environment): {problem}", hint=f"unset {variable}") from error
        yield Layer(variable, JobSpec(resources=resources))
