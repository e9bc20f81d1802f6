"""MPI beside the process group: the same ranks, met by the launcher, summing tensors of the CPU.

Started by a launcher that does not speak to this MPI each rank would be a world of its own. So all ranks agree
beforehand that they may start it, and compare afterwards.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch

from hpcjobs.runtime.exits import WorldMismatch
from hpcjobs.trainers.distributed.process_group import RankGroup

SPEAKS = {"Open MPI": ("PMIX_RANK", "OMPI_COMM_WORLD_RANK"), "MPICH": ("PMI_RANK", "PMIX_RANK")}
"""In which variables a launcher tells each process its rank, if it speaks to an MPI."""


def launcher_supports(library: str, rank: int) -> bool:
    """Whether the variables of ``library`` say which rank this is.

    A rank that an elastic agent started has the variables of the agent, which may be of another rank.
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
            WorldMismatch: in words why not; the same on every rank.
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
        """Sum over all ranks, in place; ``values`` lie end to end in the memory of the CPU."""
        self._world.Allreduce(self._mpi.IN_PLACE, values.numpy())


def shorten_version(version: str) -> str:
    """Name and version of an MPI, from what it says of itself: ``Open MPI v4.1.4``."""
    return version.splitlines()[0].split(",")[0].replace("MPICH Version:", "MPICH").strip("\0\t ")


def describe_launcher() -> str:
    """Describe which launcher started this rank; with the MPI type where it was srun."""
    launcher = os.environ.get("HPCJOBS_LAUNCHED_BY")
    if launcher is not None:
        return launcher
    kind = os.environ.get("SLURM_MPI_TYPE")
    return "the launcher" if kind is None else f"srun --mpi={kind}"


def _load_mpi4py(group: RankGroup) -> tuple[Any, str | None]:
    """mpi4py's module, not started yet, and why it must not be."""
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
