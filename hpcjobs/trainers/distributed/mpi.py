"""MPI in addition to the process group: sums CPU tensors over the same ranks, connected by the launcher.

If the launcher does not support this MPI, each rank becomes a separate world. So all ranks agree beforehand that MPI
may start, and afterwards compare its ranks and size with theirs.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch

from hpcjobs.runtime.exits import WorldMismatch
from hpcjobs.trainers.distributed.process_group import RankGroup

SPEAKS = {"Open MPI": ("PMIX_RANK", "OMPI_COMM_WORLD_RANK"), "MPICH": ("PMI_RANK", "PMIX_RANK")}
"""Variables with the rank of each process, by the MPI that a launcher supports."""


def launcher_supports(library: str, rank: int) -> bool:
    """Whether a variable of ``library`` has the number of this rank.

    Ranks of an elastic agent inherit the agent's variables, which may have another number.
    """
    return any(os.environ.get(name) == str(rank) for name in SPEAKS.get(library.split(" v")[0], ()))


class Mpi:
    """The world as MPI knows it; `sum` is its all-reduce."""

    def __init__(self, module: Any) -> None:
        self._mpi, self._world = module, module.COMM_WORLD
        self.library = shorten_version(module.Get_library_version())

    @classmethod
    def of(cls, group: RankGroup) -> Mpi:
        """Start MPI on all ranks of ``group``, or on none: a collective call.

        Raises:
            WorldMismatch: MPI cannot start, or its world differs from the group; raised on every rank.
        """
        module, problem = _load_mpi4py(group)
        problems = [str(other) for other in group.gather(problem) if other]
        if problems:
            raise WorldMismatch(problems[0])
        if not module.Is_initialized():
            module.Init_thread(module.THREAD_MULTIPLE)  # Horovod, in the same process, wants no less
            atexit.register(module.Finalize)
        size, rank = module.COMM_WORLD.size, module.COMM_WORLD.rank
        if any(group.gather((rank, size) != (group.rank, group.world_size))):
            raise WorldMismatch(f"MPI's world has {size} of {group.world_size} ranks, in an order of its own")
        return cls(module)

    def sum(self, values: torch.Tensor) -> None:
        """Sum over all ranks, in place; ``values`` are contiguous in CPU memory."""
        self._world.Allreduce(self._mpi.IN_PLACE, values.numpy())


def shorten_version(version: str) -> str:
    """Return name and version from the version text of an MPI, such as ``Open MPI v4.1.4``."""
    return version.splitlines()[0].split(",")[0].replace("MPICH Version:", "MPICH").strip("\0\t ")


def describe_launcher() -> str:
    """Describe which launcher started this rank; with the MPI type where it was srun."""
    launcher = os.environ.get("HPCJOBS_LAUNCHED_BY")
    if launcher is not None:
        return launcher
    kind = os.environ.get("SLURM_MPI_TYPE")
    return "the launcher" if kind is None else f"srun --mpi={kind}"


def _load_mpi4py(group: RankGroup) -> tuple[Any, str | None]:
    """Return mpi4py's module, not started yet, or the reason why MPI must not start."""
    if group.device.type != "cpu":
        return None, "gradients on a GPU travel by NCCL"
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return None, f"mpi4py does not load ({str(error).splitlines()[0]})"
    library = shorten_version(MPI.Get_library_version())
    if group.world_size > 1 and not launcher_supports(library, group.rank):
        return None, f"{describe_launcher()} does not speak to {library}"
    return MPI, None
