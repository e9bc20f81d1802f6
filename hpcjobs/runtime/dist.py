"""Rank, world size and the rest of this process's place in the job, read from the environment.

Sources in this order; the first that names a rank is used for everything:
torchrun and our own rank.sh (RANK …), Open MPI, Horovod, PMI, Slurm.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hpcjobs.runtime.exits import BadConfiguration, UsageError, WorldMismatch
from hpcjobs.runtime.hostlist import hosts_of

DYNAMIC_PORTS = range(20000, 32000)  # below Linux's ephemeral range, above the registered services


@dataclass(frozen=True)
class Names:
    """The variables in which one launcher publishes one process's place; None: it has no such."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str | None
    local_world_size: str | None
    node_rank: str | None


SOURCES = (
    Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    Names(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        None,
    ),
    Names(
        "horovod",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
    ),
    Names("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None),
    Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_NODEID"),
)


@dataclass(frozen=True)
class DistEnv:
    """One process's place. `master_port` is None in a world of one: there is no other rank to meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int | None
    launcher: str

    @classmethod
    def from_environ(cls, env: Mapping[str, str]) -> DistEnv:
        """Read the place of this process, or raise UsageError/WorldMismatch naming variables."""
        for names in SOURCES:
            if names.rank in env and names.world_size in env:
                position = _read(names, env)
                _refuse_frozen_rank(position, env)
                if position.launcher == "srun" and position.world_size == 1:
                    _refuse_lonely_slurm_task(env)  # the shell of salloc is a step of one task
                return position
        _refuse_lonely_slurm_task(env)
        return cls(0, 0, 1, 1, 0, "127.0.0.1", None, "none")

    def device_index(self, visible: int, *, on_node: int = 0) -> int:
        """The device of this rank among `visible` ones: Slurm may show each task only its own, or those of its socket.

        Args:
            on_node: the job's GPUs on this node, where Slurm says it.

        Raises:
            BadConfiguration: ranks would share devices. One visible device may be the rank's own.
        """
        if visible < 1:
            raise UsageError(f"rank {self.rank} sees no device", hint="--device cpu, or request GPUs")
        if 1 < visible < self.local_world_size and on_node < self.local_world_size:
            raise BadConfiguration(
                f"{self.local_world_size} ranks on the host of rank {self.rank} see {visible} GPUs",
                hint="as many ranks as GPUs: --ntasks-per-node and --gpus-per-node",
            )
        return self.local_rank % visible


def _read(names: Names, env: Mapping[str, str]) -> DistEnv:
    rank, world = _number(env, names.rank), _number(env, names.world_size)
    _refuse_outside(names.rank, rank, names.world_size, world)
    if not _is_started_by_step(names.launcher, env, rank, world):
        env = _without_step(env)
    local = _optional(env, names.local_rank)
    local_world = _optional(env, names.local_world_size)
    if local_world is None:
        local_world = _tasks_on_this_node(env) or (world if _one_node(env) else 1)
    if local is None and env.get("SLURM_PROCID") == str(rank):
        local = _optional(env, "SLURM_LOCALID")
    if local is None:
        local = rank % local_world
    _refuse_outside(
        names.local_rank or "local rank", local, names.local_world_size or "tasks on this node", local_world
    )
    node = _optional(env, names.node_rank)
    return DistEnv(
        rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=local_world,
        node_rank=rank // local_world if node is None else node,
        master_addr=_master_addr(names, env, world, local_world),
        master_port=_master_port(env, world, local_world),
        launcher=names.launcher,
    )


def _is_started_by_step(launcher: str, env: Mapping[str, str], rank: int, world: int) -> bool:
    """Whether the Slurm step in the environment is the one that started the ranks.

    mpirun's daemons run in a step of their own, which has one task per node and leaves out the first node.
    """
    if launcher in ("mpirun", "horovod"):
        return False
    return env.get("SLURM_PROCID") == str(rank) and env.get("SLURM_STEP_NUM_TASKS") == str(world)


def _without_step(env: Mapping[str, str]) -> dict[str, str]:
    of_task = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NNODES", "SLURM_NODELIST")
    return {name: value for name, value in env.items() if not (name.startswith("SLURM_STEP_") or name in of_task)}


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise UsageError(f"{name}={env[name]!r} is not a number of a process or of processes")
    return value


def _optional(env: Mapping[str, str], name: str | None) -> int | None:
    return _number(env, name) if name is not None and name in env else None


def _refuse_outside(name: str, value: int, size_name: str, size: int) -> None:
    if value >= size:
        raise UsageError(
            f"{name}={value} does not fit {size_name}={size}",
            hint="the two come from different launches; unset them and launch once",
        )


def _tasks_on_this_node(env: Mapping[str, str]) -> int | None:
    """From SLURM_STEP_TASKS_PER_NODE, written like `4(x2),3`."""
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE"), _optional(env, "SLURM_NODEID")
    if text is None or node is None:
        return None
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(times or 1)
    return counts[node] if node < len(counts) else None


def _one_node(env: Mapping[str, str]) -> bool:
    nodes = env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or env.get("SLURM_JOB_NUM_NODES", "1")
    return nodes == "1"


def _master_addr(names: Names, env: Mapping[str, str], world: int, local_world: int) -> str:
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    # The first node of the job is where rank 0 runs if Slurm or torchrun placed it; mpirun has its own order.
    of_job = env.get("SLURM_JOB_NODELIST") if names.launcher in ("torchrun", "srun") else None
    nodes = env.get("SLURM_STEP_NODELIST") or of_job
    if nodes:
        return first_host(nodes)
    if world == 1 or (world == local_world and _says_tasks_per_node(names, env)):
        return "127.0.0.1"
    raise UsageError(
        f"{world} processes on several hosts, and MASTER_ADDR is not set",
        hint="give every process the first host's name: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …",
    )


def _says_tasks_per_node(names: Names, env: Mapping[str, str]) -> bool:
    """False: PMI alone, which numbers the ranks of all hosts and need not say how many share one."""
    return names.launcher != "pmi" or names.local_world_size in env or env.get("SLURM_JOB_NUM_NODES") == "1"


def _master_port(env: Mapping[str, str], world: int, local_world: int) -> int | None:
    if env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
        if not 0 < port < 65536:
            raise UsageError(f"MASTER_PORT={port} is not a port", hint="1 to 65535")
        return port
    if world == 1:
        return None
    launch = _launch_identity(env)
    if launch is None:
        raise UsageError(
            f"{world} processes, and MASTER_PORT is not set",
            hint="give every process the same free port: MASTER_PORT=29500",
        )
    return DYNAMIC_PORTS[zlib.crc32(launch.encode()) % len(DYNAMIC_PORTS)]


def _launch_identity(env: Mapping[str, str]) -> str | None:
    """Text that all processes of one launch share and no other launch has, where there is one."""
    if "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        return f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    return env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")


def gpus_on_node(env: Mapping[str, str]) -> int:
    """The GPUs of the job's step on this node; 0: Slurm says nothing of them."""
    count = env.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdigit() else 0


def first_host(nodelist: str) -> str:
    """First name of a Slurm host list, in Slurm's order: `n[003-007,9],x1` -> `n003`."""
    try:
        return hosts_of(nodelist)[0]
    except (IndexError, ValueError) as error:
        raise UsageError(f"the host list {nodelist!r} names no host") from error


def _refuse_frozen_rank(position: DistEnv, env: Mapping[str, str]) -> None:
    """RANK exported once by a batch script is the same in all tasks; srun's own counter is not."""
    task, tasks = env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS")
    if position.launcher != "torchrun" or "TORCHELASTIC_RUN_ID" in env or task is None:
        return
    if tasks == str(position.world_size) and task != str(position.rank):
        raise UsageError(
            f"RANK={position.rank} but SLURM_PROCID={task} of {tasks} tasks",
            hint="the batch script exports RANK for all tasks alike; set it per task, inside srun",
        )
    if position.world_size == 1 and tasks is not None and int(tasks) > 1:
        raise WorldMismatch(
            f"WORLD_SIZE=1 but SLURM_STEP_NUM_TASKS={tasks}: each task would train alone",
            hint="unset WORLD_SIZE and RANK, or set them per task",
        )


def _refuse_lonely_slurm_task(env: Mapping[str, str]) -> None:
    tasks = env.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in env and tasks.isdigit() and int(tasks) > 1:
        raise WorldMismatch(
            f"SLURM_NTASKS={tasks}, but this process was started outside srun and would train alone",
            hint="start it with `srun` (or torchrun) inside the allocation",
        )


def refuse_other_world(position: DistEnv, env: Mapping[str, str]) -> None:
    """Raises WorldMismatch where the world that started is not the one that the job requested."""
    requested = env.get("HPCJOBS_NTASKS")
    if requested is not None and requested != str(position.world_size):
        raise WorldMismatch(
            f"the job asked for {requested} ranks (HPCJOBS_NTASKS), but the world that started has "
            f"{position.world_size}",
            hint="start all tasks in one srun or torchrun, without an -n of its own",
        )
