"""Joins the process group within a deadline, and leaves it cleanly.

All ranks first meet at one store; after a deadline the absent ranks are named.

Errors of torch, NCCL and MPI are translated for the user and reported by one rank. Ranks that share cores are reported.
"""

from __future__ import annotations

import atexit
import errno
import gc
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from hpcjobs import gpu_errors
from hpcjobs.runtime import signals
from hpcjobs.runtime.dist import DistEnv, gpus_on_node
from hpcjobs.runtime.exits import (
    AlreadyReported,
    BadConfiguration,
    GpuFault,
    OutOfMemory,
    PeerLost,
    RendezvousError,
    StorageFault,
    TrainerError,
    WorldMismatch,
    print_error,
)
from hpcjobs.scheduler_kind import find_kind
from hpcjobs.slurm_commands import read_hosts

PORT_RETRY_S = 0.2
VERDICT_GRACE_S = 10.0  # rank 0 starts its wait later than the others, by at most this


def open_store(env: DistEnv, timeout_s: float) -> Store:
    """Return the key-value store of this launch, hosted by rank 0 or by torchrun's agent.

    An agent's store outlives its ranks: each start uses a separate prefix, with the agent's count of restarts.
    """
    if env.master_port is None:
        return HashStore()
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosting = env.rank == 0 and not of_agent
    try:
        if not hosting:
            _await_port(env.master_addr, env.master_port, timeout_s)
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=hosting,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise _unreachable(env, error, timeout_s, hosting=hosting) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_agent else "0"
    return PrefixStore(f"hpcjobs/{attempt}", store)


def _await_port(host: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 listens; after `timeout_s`, raise the last OSError of the connection."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
            return
        except OSError:  # noqa: PERF203
            if time.monotonic() > deadline:
                raise
            time.sleep(PORT_RETRY_S)


def _unreachable(env: DistEnv, cause: Exception, timeout_s: float, *, hosting: bool) -> TrainerError:
    who, where = f"rank {env.rank} on {socket.gethostname()}", f"{env.master_addr}:{env.master_port}"
    if hosting:
        error = RendezvousError(f"{who} could not open {where}", hint="is the port taken? choose another MASTER_PORT")
    else:
        error = RendezvousError(
            f"{who} did not reach rank 0 at {where} within {timeout_s:g} s ({cause})",
            hint="does that name resolve here, and may hosts connect to each other?",
        )
    error.elected = True  # without a store no other rank can be asked
    return error


def roll_call(env: DistEnv, store: Store, timeout_s: float) -> tuple[str, ...]:
    """The hosts by rank, once rank 0 has checked that this is the requested world."""
    _claim_rank(env, store)
    if env.rank != 0:
        return _await_verdict(env, store, timeout_s)
    try:
        hosts = _judge(env, store, timeout_s)
    except TrainerError as error:
        store.set("verdict", json.dumps({"code": int(error.code), "message": str(error)}))
        raise
    store.set("verdict", json.dumps({"hosts": hosts}))
    return tuple(hosts)


def _claim_rank(env: DistEnv, store: Store) -> None:
    host = socket.gethostname()
    node = os.environ.get("SLURMD_NODENAME") or host
    claims = store.add(f"claims/{env.rank}", 1)
    if claims > 1:
        error = WorldMismatch(
            f"{claims} processes call themselves rank {env.rank}; one is on {host}",
            hint="RANK must be set per task, not exported once for all",
        )
        error.elected = True
        raise error
    store.set(f"here/{env.rank}", json.dumps([host, node]))


def _await_verdict(env: DistEnv, store: Store, timeout_s: float) -> tuple[str, ...]:
    try:
        store.wait(["verdict"], timedelta(seconds=timeout_s + VERDICT_GRACE_S))
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {env.rank} on {socket.gethostname()} reached {env.master_addr}:{env.master_port}, "
            "but rank 0 never answered"
        ) from error
    verdict = json.loads(store.get("verdict"))
    if "code" in verdict:
        raise AlreadyReported(verdict["code"], verdict["message"])
    return tuple(verdict["hosts"])


def _judge(env: DistEnv, store: Store, timeout_s: float) -> list[str]:
    keys = [f"here/{rank}" for rank in range(env.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError:
        arrived = [rank for rank, key in enumerate(keys) if store.check([key])]
        names = node_names(store, [keys[rank] for rank in arrived])
        raise _absent(env, dict(zip(arrived, names, strict=True)), timeout_s) from None
    hosts = node_names(store, keys)
    requested = os.environ.get("HPCJOBS_NNODES")
    if requested is not None and len(set(hosts)) < int(requested):
        raise WorldMismatch(
            f"the job asked for {requested} nodes (HPCJOBS_NNODES), but its {env.world_size} ranks run on "
            f"{len(set(hosts))}: {_tally(hosts)}",
            hint="is --ntasks-per-node larger than requested, or has a node dropped out?",
        )
    return hosts


def node_names(store: Store, keys: list[str]) -> list[str]:
    """The hosts of the ranks that wrote ``keys``, by Slurm's names of its nodes where they are known.

    Slurm knows a node by its NodeName alone, which need not be its hostname. A launcher that sends the environment
    of the first node to all others makes one name of several hosts: hostnames are used then.
    """
    claims = [json.loads(store.get(key)) for key in keys]
    hosts, nodes = [host for host, _ in claims], [node for _, node in claims]
    return nodes if len(set(nodes)) >= len(set(hosts)) else hosts


def _absent(env: DistEnv, here: dict[int, str], timeout_s: float) -> RendezvousError:
    missing = [str(rank) for rank in range(env.world_size) if rank not in here]
    return RendezvousError(
        f"{len(missing)} of {env.world_size} ranks did not arrive at {env.master_addr}:{env.master_port} "
        f"within {timeout_s:g} s: rank {', '.join(missing)}; arrived: {_tally(list(here.values()))}"
        f"{_silent_nodes(here.values())}",
        hint="look at the other nodes' logs; --rendezvous-timeout-s waits longer",
    )


def _silent_nodes(here: Iterable[str]) -> str:
    """Name the nodes of SLURM_JOB_NODELIST without a rank; empty if every node has one, or no node has."""
    nodes = read_hosts(os.environ.get("SLURM_JOB_NODELIST"))
    arrived = {host.partition(".")[0] for host in here}
    silent = [node for node in nodes if node.partition(".")[0] not in arrived]
    return f"; nobody from {', '.join(silent)}" if silent and len(silent) < len(nodes) else ""


def _tally(hosts: list[str]) -> str:
    return ", ".join(f"{host} ({count} ranks)" for host, count in Counter(hosts).items())


def format_cores(cores: Set[int]) -> str:
    """Format cores 0, 1, 2, 5 as `0-2,5`, as taskset does."""
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def describe_shared_cores(hosts: Sequence[str], ranks: Sequence[tuple[int, Set[int]]]) -> Iterator[str]:
    """Yield a warning for each host with more threads than cores; `ranks` has threads and allowed cores by rank."""
    for host in dict.fromkeys(hosts):
        here = [mine for name, mine in zip(hosts, ranks, strict=True) if name == host]
        threads, cores = sum(count for count, _ in here), set().union(*(allowed for _, allowed in here))
        if threads > len(cores):
            yield (
                f"warning: {len(here)} ranks on {host} share cores: {threads} threads on {len(cores)} "
                f"({format_cores(cores)}); steps wait for each other. Hint: fewer ranks, or more --cpus-per-task"
            )


def count_cores_per_rank(hosts: Sequence[str], allowed: Sequence[Set[int]]) -> int:
    """The cores of the rank that has fewest: its allowed ones, divided among the ranks of the host that share some."""
    return min(
        len(mine) // sum(1 for name, others in zip(hosts, allowed, strict=True) if name == host and mine & others)
        for host, mine in zip(hosts, allowed, strict=True)
    )


PEER_SPEAKS_S = 3.0  # a rank that lost a peer waits this long for the peer's error
CLAIM_LINGERS_S = 1.0
LOST = ("gloo/transport", "Horovod has been shut down")
"""In addition to `gpu_errors`."""
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO)
FULL = ("DefaultCPUAllocator", "not enough memory", "out of memory")
END_OF_FACTS = re.compile(
    r"Exception raised from|CUDA kernel errors might be|HIP kernel errors might be|For debugging consider|"
    r"Search for .(?:cuda|hip)Error|Compile with .?TORCH_USE|If reserved but unallocated|"
    r"If reserved memory is|See documentation for"
)
"""Start of torch's general advice or of its C++ stack."""


def translate_error(error: Exception, env: DistEnv) -> TrainerError | None:
    """Translate an error that the user can act on; None for a bug."""
    if isinstance(error, TrainerError):
        return error
    if isinstance(error, OSError) and error.errno in STORAGE:
        return StorageFault(f"rank {env.rank} can't write: {error}", hint="free space or quota, or mount it again")
    text = str(error)
    kind = gpu_errors.FULL if isinstance(error, torch.OutOfMemoryError) else gpu_errors.classify(text)
    if kind is not None and isinstance(error, RuntimeError | ImportError):
        return translate_gpu_error(kind, extract_facts(text), env)
    if isinstance(error, MemoryError) or any(sign in text for sign in FULL):
        return OutOfMemory(
            f"rank {env.rank} ran out of memory",
            hint="a smaller --batch-size with a larger --accumulate keeps the result, or ask for more --mem",
        )
    if isinstance(error, dist.DistBackendError):  # an unknown NCCL error keeps its text and traceback
        return None
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in LOST)):
        return translate_gpu_error(gpu_errors.LOST, extract_facts(text), env)
    return None


def translate_gpu_error(kind: gpu_errors.GpuError, facts: str, env: DistEnv) -> TrainerError:
    """The error of this kind, with the library's own text; the host of a GPU with a fault becomes a suspect."""
    where = f"rank {env.rank} on {socket.gethostname()}"
    if kind.effect == gpu_errors.FAULT:
        try:
            signals.suspect(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        except OSError as error:  # a run folder that is away must not hide the fault
            print_error(f"warning: the suspects cannot be written: {error}")
        return GpuFault(f"{where}: {facts}", hint="another node; tell the administrators")
    if kind.effect == gpu_errors.OUT_OF_MEMORY:
        return OutOfMemory(f"{where} ran out of GPU memory: {facts}", hint=kind.fix)
    if kind.effect == gpu_errors.CONFIGURATION:
        return BadConfiguration(f"{where}: {facts}", hint=f"{kind.text}: {kind.fix}")
    return PeerLost(
        f"rank {env.rank} lost another rank in the middle of the run: {facts}",
        hint="the log of the rank that ended first says why; killed without a word often means memory",
    )


def extract_facts(text: str) -> str:
    """The text of an error in one line, without the general advice and the C++ stack that torch appends."""
    end = END_OF_FACTS.search(text)
    return " ".join((text if end is None else text[: end.start()]).split()).rstrip(" .")


def elect_reporter(error: TrainerError, env: DistEnv, store: Store) -> TrainerError:
    """Return the error on the first rank that claims it, AlreadyReported on the others."""
    if isinstance(error, AlreadyReported) or error.elected:
        return error
    try:
        if isinstance(error, PeerLost):
            _await_claim(store)
        if store.add("error/claims", 1) > 1:
            _await_claim(store)
            return AlreadyReported(*json.loads(store.get("error")))
        store.set("error", json.dumps([int(error.code), str(error)]))
    except dist.DistError:  # the store went with rank 0, and rank 1 is the first that can tell
        if env.rank > 1:
            return AlreadyReported(error.code, str(error))
    error.elected = True
    if env.rank == 0 and env.world_size > 1:
        print_error(f"error: {error}")
        time.sleep(CLAIM_LINGERS_S)  # the store ends with this process: let the others read the claim
        return AlreadyReported(error.code, str(error))
    return error


def _await_claim(store: Store) -> None:
    try:
        store.wait(["error"], timedelta(seconds=PEER_SPEAKS_S))
    except dist.DistNetworkError:
        raise
    except dist.DistStoreError:
        return


COLLECTIVE_TIMEOUT = {"gloo": timedelta(hours=1), "nccl": timedelta(hours=1)}
"""By backend, for one collective. Longer than the watchdog's limit: the watchdog names the rank that is behind."""
_HELD: list[dist.ProcessGroup | None] = []
"""References to groups, until `release_groups`. The last owner of a group waits for gloo's threads, which may need the
GIL to end. A Python reference releases the GIL for the wait; DDP's reducer would hold it for ever."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run with their hosts, seen from one of them, and their collectives."""

    env: DistEnv
    hosts: tuple[str, ...]  # by rank
    device: torch.device
    backend: str
    store: Store = field(default_factory=HashStore)
    """Key-value store of the ranks, used outside of collectives."""

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Largest over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def rows(self, mine: Sequence[float]) -> torch.Tensor:
        """A row of numbers from every rank, by rank: [world size, numbers] in fp64, on the host."""
        rows = torch.zeros(self.world_size, len(mine), dtype=torch.float64)
        rows[self.rank] = torch.tensor(mine, dtype=torch.float64)
        return self.sum(rows.to(self.device)).cpu()

    def gather(self, value: object) -> list[object]:
        """Every rank's value, by rank, on every rank."""
        everyone: list[object] = [None] * self.world_size
        dist.all_gather_object(everyone, value)
        return everyone

    def from_first(self, value: str) -> str:
        """Rank 0's value, on every rank."""
        return str(self.gather(value if self.rank == 0 else None)[0])

    def agree(self, mine: bool) -> bool:
        """Rank 0's verdict, on every rank."""
        return bool(self.sum(torch.tensor(int(mine and self.rank == 0), device=self.device)))

    def aside(self) -> dist.ProcessGroup:
        """All ranks once more, for a thread that must not mix with the collectives of the main one."""
        aside: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT["gloo"])
        return aside

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def log(self, text: str) -> None:
        """A line of progress, from rank 0."""
        if self.rank == 0:
            print(text, flush=True)


@contextmanager
def join_world(
    env: DistEnv, *, device: str, timeout_s: float, stall_after_s: float | None = None
) -> Iterator[RankGroup]:
    """Form the world, or name the missing ranks; inside, errors are translated, and one rank reports them.

    Args:
        timeout_s: for all ranks to arrive.
        stall_after_s: the watchdog's limit; a collective may take longer.
    """
    store = open_store(env, timeout_s)
    try:
        group = _form(env, store, device, timeout_s, stall_after_s or 0.0)
        yield group
        group.barrier()  # the store ends with rank 0's process: all ranks are done with it here
        dist.destroy_process_group()
    except Exception as error:
        ours = translate_error(error, env)
        if ours is None:
            raise
        raise elect_reporter(ours, env, store) from error
    finally:
        # to destroy a failed NCCL group would wait for lost peers; the end of the process does not
        if dist.is_initialized() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            dist.destroy_process_group()


def release_groups() -> None:
    """Drop the references to process groups, after the models that used them are collected."""
    if _HELD:
        gc.collect()
        _HELD.clear()


def _form(env: DistEnv, store: Store, device_name: str, timeout_s: float, stall_after_s: float) -> RankGroup:
    hosts = roll_call(env, store, timeout_s)
    device = choose_device(device_name, env, os.environ)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    init_process_group(device, env, PrefixStore("group", store), stall_after_s=stall_after_s)
    _HELD.append(dist.group.WORLD)
    of_gpu = "nccl" if torch.version.hip is None else "rccl"  # torch calls AMD's library nccl too
    return RankGroup(env, hosts, device, of_gpu if device.type == "cuda" else "gloo", store)


def init_process_group(device: torch.device, env: DistEnv, store: Store, *, stall_after_s: float = 0.0) -> None:
    """Form torch's default group; with a GPU, NCCL connects at once, and to that GPU."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=env.rank,
        world_size=env.world_size,
        timeout=max(COLLECTIVE_TIMEOUT["nccl" if on_gpu else "gloo"], timedelta(seconds=2 * stall_after_s)),
        device_id=device if on_gpu else None,
    )


def choose_device(name: str, env: DistEnv, environ: Mapping[str, str]) -> torch.device:
    """Choose the device of this rank by `--device`, its visible GPUs and the job's request.

    Raises BadConfiguration: the job requested GPUs and this rank sees none, or several ranks would share one.
    """
    if name == "cpu":
        return torch.device("cpu")
    visible, requested = torch.cuda.device_count(), requests_gpus(environ)
    if visible == 0 and requested is not None:
        build = torch.version.cuda or torch.version.hip
        why = "this torch is built for the CPU" if build is None else f"this torch is built for {build}"
        raise BadConfiguration(
            f"the job has GPUs ({requested}), but rank {env.rank} on {socket.gethostname()} sees none; {why}",
            hint="nvidia-smi or rocm-smi on the node, and a torch with CUDA or ROCm; --device cpu trains without GPUs",
        )
    if not torch.cuda.is_available():
        if visible > 0 and (name == "cuda" or requested is not None):  # NVML also counts GPUs that CUDA cannot start
            raise explain_failed_start(visible, env)
        if name == "auto":
            return torch.device("cpu")
    return torch.device("cuda", env.device_index(visible, on_node=gpus_on_node(environ)))


def explain_failed_start(visible: int, env: DistEnv) -> TrainerError:
    """Return the error of CUDA's start with CUDA's text: BadConfiguration, unless the text is of a known kind."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:
        if (known := translate_error(error, env)) is not None:
            return known
        reason = extract_facts(str(error))
    return BadConfiguration(
        f"rank {env.rank} on {socket.gethostname()} has {visible} GPUs, and none can be used: {reason}",
        hint="nvidia-smi or rocm-smi on the node: its driver must fit this torch; --device cpu trains without GPUs",
    )


def requests_gpus(environ: Mapping[str, str]) -> str | None:
    """Return the scheduler's variable for the GPUs of this job, as NAME=VALUE; None without GPUs."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    if count not in ("", "0"):
        return f"SLURM_GPUS_ON_NODE={count}"
    lists = ["SLURM_JOB_GPUS", "SLURM_STEP_GPUS"]  # of device numbers: 0 is one
    if not find_kind(environ.get("HPCJOBS_SCHEDULER", "")).has_nodes:
        lists.append("CUDA_VISIBLE_DEVICES")
    return next((f"{name}={environ[name]}" for name in lists if environ.get(name)), None)


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

        Raises WorldMismatch: MPI cannot start, or its world differs from the group; raised on every rank.
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
