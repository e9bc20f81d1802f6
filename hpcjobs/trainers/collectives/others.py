"""All-reduce beside torch's own: over Horovod, and over MPI by mpi4py."""

from __future__ import annotations

from hpcjobs.trainers.collectives.sweep import Reduce
from hpcjobs.trainers.distributed.process_group import RankGroup


def over_horovod(group: RankGroup) -> tuple[str, Reduce]:
    """Horovod, started as the trainer does it."""
    from hpcjobs.trainers.strategies.horovod_world import hvd, start

    name = start(group.env, group.hosts, controller="auto", share=group.from_first, log=lambda _: None)
    return name, lambda values: hvd.allreduce_(values, op=hvd.Sum, name="sweep")


def over_mpi(group: RankGroup) -> tuple[str, Reduce]:
    """MPI itself, where the launcher speaks to it.

    Raises:
        WorldMismatch: it does not.
    """
    from hpcjobs.trainers.distributed.mpi import Mpi

    world = Mpi.of(group)
    return "mpi", world.sum
