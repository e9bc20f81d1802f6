"""All-reduce beside torch's own: over Horovod, and over MPI by mpi4py."""

from __future__ import annotations

from hpcjobs.trainers.collectives.sweep import Reduce
from hpcjobs.trainers.distributed.process_group import Group


def over_horovod(group: Group) -> tuple[str, Reduce]:
    """Horovod, started as the trainer does it."""
    from hpcjobs.trainers.strategies.horovod_gloo import hvd
    from hpcjobs.trainers.strategies.horovod_world import start

    name = start(group.env, group.hosts, controller="auto", share=group.from_first, say=lambda _: None)
    return name, lambda values: hvd.allreduce_(values, op=hvd.Sum, name="sweep")


def over_mpi(group: Group) -> tuple[str, Reduce]:
    """MPI itself, where the launcher speaks to it.

    Raises:
        WorldMismatch: it does not.
    """
    from hpcjobs.trainers.distributed.mpi import Mpi

    world = Mpi.of(group)
    return "mpi", world.sum
