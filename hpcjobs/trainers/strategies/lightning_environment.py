"""The cluster environment that Lightning is given: the world that a launcher started."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.distributed.process_group import RankGroup


def choose_environment(group: RankGroup) -> ClusterEnvironment:
    """Return SLURMEnvironment if srun started exactly this world; otherwise ours (torchrun, mpirun, by hand)."""
    env, variables = group.env, os.environ
    expected = {
        "SLURM_STEP_NUM_TASKS": env.world_size,
        "SLURM_NTASKS": env.world_size,
        "SLURM_NTASKS_PER_NODE": env.local_world_size,
        "SLURM_NNODES": len(set(group.hosts)),
        "SLURM_PROCID": env.rank,
        "SLURM_LOCALID": env.local_rank,
    }
    by_srun = all(variables.get(name) == str(value) for name, value in expected.items())
    if by_srun and "TORCHELASTIC_RUN_ID" not in variables:
        return SLURMEnvironment(auto_requeue=False)
    return LauncherEnvironment(group.env)


class LauncherEnvironment(ClusterEnvironment):
    """The world that a launcher started, as `DistEnv` read it. Lightning starts no process and changes no rank."""

    def __init__(self, env: DistEnv) -> None:
        super().__init__()
        self.env = env

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.env.master_addr

    @property
    def main_port(self) -> int:
        return self.env.master_port or 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.env.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return self.env.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return self.env.local_rank

    def node_rank(self) -> int:
        return self.env.node_rank
