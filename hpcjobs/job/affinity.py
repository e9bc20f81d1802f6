"""Chooses the cores and GPUs that ranks may use: the site's choice, else what launcher and GPUs suggest."""

from __future__ import annotations

from msgspec.structs import replace

from hpcjobs.job.layers import Values
from hpcjobs.site.affinity import Affinity
from hpcjobs.site.models import Site

BY_SRUN = ("cpu_bind", "distribution", "gpu_bind")
_TO_GPUS = ("gpu_bind", "numa_binding")
_STARTED_BY_SRUN = ("srun", "torchrun", "horovod-gloo")


def choose_affinity(site: Site, values: Values, *, launcher: str) -> tuple[Affinity, dict[str, str]]:
    """What binds the ranks, and where each value comes from; ``None``: the launcher's own default.

    A `distribution` of the job is an option of sbatch, which the step inherits. The defaults:

    - cores for each rank of a job with GPUs: a rank that wanders leaves the memory beside its GPU;
    - block:block: GPUs are numbered along the sockets, and Slurm would deal consecutive ranks to alternate sockets;
    - no binding of GPUs: ranks that see all of a node's GPUs reach each other's memory, and each takes its own;
    - the NUMA node of its GPU for each rank of torchrun, where all cores of the node are the job's.
    """
    gpus, slurm = values["gpus_per_node"] or 0, site.scheduler == "slurm"
    gpu_count = int(str(gpus).rpartition(":")[2])
    defaults: dict[str, tuple[str, str]] = {}
    if slurm and gpu_count:
        defaults |= {"cpu_bind": ("cores", "default with GPUs"), "distribution": ("block:block", "default with GPUs")}
    if gpu_count > 1 and (not slurm or values["exclusive"] is True):
        defaults["numa_binding"] = ("node", "default with several GPUs of a node for itself")
    defaults["mpirun_bind_to"] = ("none", "default")
    chosen, sources = {}, {}
    for field in _fields_of(launcher, slurm=slurm, gpus=gpu_count > 0):
        value, source = getattr(site.affinity, field), f"site {site.name}"
        if value is None:
            value, source = defaults.get(field, (None, ""))
        if field == "distribution" and values["distribution"] is not None:
            value = None
        if value is not None and not (value == "default" and field in BY_SRUN):
            chosen[field], sources[f"affinity.{field}"] = value, source
    return replace(Affinity(), **chosen), sources


def _fields_of(launcher: str, *, slurm: bool, gpus: bool) -> tuple[str, ...]:
    """What this launcher has an option for; without GPUs nothing that binds to them: torch would end."""
    by_srun = BY_SRUN if slurm and launcher in _STARTED_BY_SRUN else ()
    own = {"torchrun": ("numa_binding",), "mpirun": ("mpirun_bind_to",)}.get(launcher, ())
    return tuple(field for field in (*by_srun, *own) if gpus or field not in _TO_GPUS)


def srun_options(affinity: Affinity) -> tuple[str, ...]:
    """The options of the srun that starts the tasks."""
    named = ((field, getattr(affinity, field)) for field in BY_SRUN)
    return tuple(f"--{field.replace('_', '-')}={value}" for field, value in named if value is not None)
