"""Rank, world size, run folder and GPUs of this process, read from the environment.

Sources in this order; the first that names a rank is used for everything:
torchrun and our own rank.sh (RANK …), Open MPI, Horovod, PMI, Slurm.
"""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcjobs.ports import find_free_port
from hpcjobs.runtime.exits import BadConfiguration, StorageFault, UsageError, WorldMismatch
from hpcjobs.slurm_commands import hosts_of

DYNAMIC_PORTS = range(20000, 32000)  # below Linux's ephemeral range, above the registered services


@dataclass(frozen=True)
class Names:
    """A launcher's variables for rank and world size; None: it has no such variable."""

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
    Names("horovod", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
    Names("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None),
    Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_NODEID"),
)


@dataclass(frozen=True)
class DistEnv:
    """Rank and world of a process. `master_port` is None in a world of one."""

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
        """Return the index of this rank's device among `visible` ones.

        Slurm may show each task only one device, or only the devices of its socket.

        Args:
            on_node: number of the job's GPUs on this node, if Slurm publishes it.

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
        master_port=_master_port(env, world),
        launcher=names.launcher,
    )


def _is_started_by_step(launcher: str, env: Mapping[str, str], rank: int, world: int) -> bool:
    """Whether the Slurm step in the environment started the ranks.

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
    # Slurm and torchrun start rank 0 on the first node of the job; mpirun may use another order.
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
    """False for PMI alone: it numbers the ranks of all hosts, and may not count the ranks of a host."""
    return names.launcher != "pmi" or names.local_world_size in env or env.get("SLURM_JOB_NUM_NODES") == "1"


def _master_port(env: Mapping[str, str], world: int) -> int | None:
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
    """Return the number of the step's GPUs on this node; 0 if Slurm does not set it."""
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
    """Raise WorldMismatch if the world size differs from the job's request."""
    requested = env.get("HPCJOBS_NTASKS")
    if requested is not None and requested != str(position.world_size):
        raise WorldMismatch(
            f"the job asked for {requested} ranks (HPCJOBS_NTASKS), but the world that started has "
            f"{position.world_size}",
            hint="start all tasks in one srun or torchrun, without an -n of its own",
        )


_GPU_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def choose_run_dir(given: str | os.PathLike[str] | None, name: str, env: DistEnv) -> Path:
    """Return the job's run folder; outside a job `given`, or runs/NAME, which rank 0 prints."""
    of_job = os.environ.get("HPCJOBS_RUN_DIR")
    if of_job and given is not None and Path(of_job).resolve() != Path(given).resolve():
        raise UsageError(f"run_dir={os.fspath(given)!r}, but the job's run folder is {of_job}", hint="leave it out")
    folder = Path(of_job or given or f"runs/{name}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFault(
            f"the run folder {folder} can't be made: {error.strerror}", hint="start(run_dir=...) chooses another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageFault(f"nothing can be written into the run folder {folder}", hint="is it another user's?")
    if not of_job and given is None and env.rank == 0:
        print(f"not started by hpcjobs: files go to {folder}; start(run_dir=...) chooses another folder", flush=True)
    return folder


def export_ranks(env: DistEnv) -> None:
    """Set the variables that `torch.distributed.init_process_group` reads, where the launcher has not.

    Without a launcher LOCAL_RANK stays unset: libraries take it as the sign that one has started this process.
    """
    values = {
        "RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": find_free_port() if env.master_port is None else env.master_port,
    }
    if env.launcher != "none":
        values |= {"LOCAL_RANK": env.local_rank, "LOCAL_WORLD_SIZE": env.local_world_size}
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def count_gpus() -> int:
    """GPUs that this process sees: by the variable that lists them, by torch if it is loaded, by NVIDIA's devices."""
    for name in _GPU_LISTS:
        if (listed := os.environ.get(name)) is not None:
            devices = [item.strip() for item in listed.split(",") if item.strip() not in ("", "-1", "NoDevFiles")]
            return 1 if devices and devices[0].startswith("MIG-") else len(devices)  # CUDA shows one MIG slice
    torch = sys.modules.get("torch")
    if torch is not None:
        count: int = torch.cuda.device_count()
        return count
    return len([item for item in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", item)])


def refuse_less_than_one(**arguments: Any) -> None:
    """Raises UsageError for an argument of `start()` that is neither None nor a whole number from 1 on."""
    for name, value in arguments.items():
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"start(): {name}={value!r}, expected a whole number from 1 on")
