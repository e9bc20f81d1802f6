"""Reads a user's settings of sbatch or salloc from environment variables: they override the site, not options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.site.models import Resources
from hpcjobs.site.type_errors import in_plain_words

VARIABLES = {
    "ACCOUNT": "account",
    "CONSTRAINT": "constraint",
    "CPUS_PER_GPU": "cpus_per_gpu",
    "GPUS": "gpus",
    "GPUS_PER_NODE": "gpus_per_node",
    "GPUS_PER_TASK": "gpus_per_task",
    "GRES": "gres",
    "HINT": "hint",
    "MEM_PER_CPU": "mem_per_cpu",
    "MEM_PER_GPU": "mem_per_gpu",
    "MEM_PER_NODE": "mem",
    "PARTITION": "partition",
    "QOS": "qos",
    "RESERVATION": "reservation",
    "TIMELIMIT": "time",
    "WCKEY": "wckey",
}
"""What users set for all their jobs, behind ``SBATCH_`` or ``SALLOC_``.

sbatch does not get the variables: there they would win over the script.
"""


_OF_REAL_CLUSTER = ("account", "reservation", "wckey")
"""A sandbox that plays the site does not know a user's own."""


def user_settings(environ: Mapping[str, str], *, command: str = "sbatch", rehearsal: bool) -> Iterator[Layer]:
    """One layer per variable of ``command`` that is set.

    Raises:
        RequestError: a value that the option cannot have.
    """
    for option, field in VARIABLES.items():
        variable = f"{command.upper()}_{option}"
        value = environ.get(variable)
        if not value or (rehearsal and field in _OF_REAL_CLUSTER):
            continue
        try:
            resources = msgspec.convert({field: value}, Resources, strict=False)
        except msgspec.ValidationError as error:
            problem = in_plain_words(str(error).partition(" - at `$.")[0])
            raise RequestError(f"{variable}={value!r} (environment): {problem}", hint=f"unset {variable}") from error
        yield Layer(variable, JobSpec(resources=resources))
