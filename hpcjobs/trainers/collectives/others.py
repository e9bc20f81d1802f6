"""All-reduce over Horovod and over MPI (mpi4py), to compare with torch's all-reduce."""

from __future__ import annotations

from hpcjobs.trainers.collectives.sweep import Reduce
from hpcjobs.trainers.distributed.process_group import RankGroup


def over_horovod(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by Horovod, started as in the trainer."""
    from hpcjobs.trainers.strategies.horovod_world import hvd, start

    name = start(group.env, group.hosts, controller="auto", share=group.from_first, log=lambda _: None)
    return name, lambda values: hvd.allreduce_(values, op=hvd.Sum, name="sweep")


def over_mpi(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by MPI.

    Raises:
        WorldMismatch: MPI cannot start on all ranks.
    """
    from hpcjobs.trainers.distributed.mpi import Mpi

    world = Mpi.of(group)
    return "mpi", world.sum
