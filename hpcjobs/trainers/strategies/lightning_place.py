"""Where a rank stands, as Lightning asks for it."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from hpcjobs.trainers.distributed.process_group import Group


def place(group: Group) -> ClusterEnvironment:
    """Lightning's own reading of Slurm where srun started exactly this world, else ours: torchrun, mpirun, by hand."""
    env, said = group.env, os.environ
    expected = {
        "SLURM_STEP_NUM_TASKS": env.world_size,
        "SLURM_NTASKS": env.world_size,
        "SLURM_NTASKS_PER_NODE": env.local_world_size,
        "SLURM_NNODES": len(set(group.hosts)),
        "SLURM_PROCID": env.rank,
        "SLURM_LOCALID": env.local_rank,
    }
    if "TORCHELASTIC_RUN_ID" not in said and all(said.get(key) == str(value) for key, value in expected.items()):
        return SLURMEnvironment(auto_requeue=False)
    return Place(group)


class Place(ClusterEnvironment):
    """A rank as our own environment reading found it."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._env = group.env

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._env.master_addr

    @property
    def main_port(self) -> int:
        return self._env.master_port or 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._env.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has settled it."""

    def global_rank(self) -> int:
        return self._env.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has settled it."""

    def local_rank(self) -> int:
        return self._env.local_rank

    def node_rank(self) -> int:
        return self._env.node_rank
