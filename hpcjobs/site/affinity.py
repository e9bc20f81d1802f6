"""Section `affinity` of a site file: which cores and GPUs each rank may use."""

from __future__ import annotations

from typing import Literal

from hpcjobs.site.checks import check_line
from hpcjobs.site.frozen import Frozen

NumaBinding = Literal["node", "socket", "exclusive", "core-complex", "none"]
BindTo = Literal["none", "core", "l3cache", "numa", "socket"]


class Affinity(Frozen, frozen=True):
    """What binds ranks to cores and GPUs; ``None``: chosen by the job (docs/gpu.md).

    Slurm's words are those of srun; ``default`` leaves the matter to the cluster.
    """

    cpu_bind: str | None = None
    """``srun --cpu-bind``; for jobs with GPUs ``cores``, else the cluster's default."""
    distribution: str | None = None
    """``srun --distribution``, unless the job names one; with GPUs ``block:block``: GPUs are numbered by socket too."""
    gpu_bind: str | None = None
    """``srun --gpu-bind`` (``closest``, ``none``, ``map_gpu:3,2,1,0``); else the cluster's default."""
    numa_binding: NumaBinding | None = None
    """``torchrun --numa-binding``, where the node's torch and numactl have it; with several GPUs of a node that the job
    has for itself ``node``, else ``none``."""
    mpirun_bind_to: BindTo | None = None
    """``mpirun --bind-to``; else ``none``: on a shared node Open MPI would bind every job to the same cores."""

    def __post_init__(self) -> None:
        for field in ("cpu_bind", "distribution", "gpu_bind"):
            if (value := getattr(self, field)) is not None:
                check_line(value, f"affinity.{field}")
