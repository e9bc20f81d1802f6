"""``python -m hpcjobs.trainers.measure``: the figures of GPUs and of all-reduce, for the health check of nodes.

Start it once on each node: it starts a process for each visible GPU, and all processes form one world. Each process
checks a product of integer matrices against the exact result, multiplies large bf16 matrices, copies within the memory
of its GPU, and copies to the other GPUs of the node, one GPU of a node at a time. Then NCCL sums within nodes and over
all nodes. Rank 0 writes the figures.

With ``--over`` every rank of a launch runs it, like a trainer: all-reduces by size, over torch's group, Horovod or MPI
(mpi4py). The time of a round is that of the slowest rank, and the best of several rounds counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hpcjobs.ports import find_free_port
from hpcjobs.runtime.dist import DistEnv, gpus_on_node
from hpcjobs.runtime.exits import ExitCode, RendezvousError, TrainerError
from hpcjobs.trainers.distributed import Mpi, RankGroup, join_world
from hpcjobs.trainers.launch import report

ROUNDS = 5
CLOCKS_S = 0.3
"""Seconds of products on a GPU: an idle GPU needs a tenth of a second to raise its clocks."""
PORT_OFFSET = 7
"""From the port of the launch, which another program of the same check may still hold."""


@dataclass(frozen=True)
class Sizes:
    """A product large enough for all tensor cores; copies larger than any cache."""

    matrix: int
    memory_bytes: int
    peer_bytes: int
    allreduce_bytes: int


ON_GPU = Sizes(8192, 1 << 30, 256 << 20, 64 << 20)
ON_CPU = Sizes(64, 1 << 20, 1 << 20, 64 << 10)


def multiply(device: torch.device, size: int) -> tuple[float, str | None]:
    """Return FLOP/s of bf16 products (fp16 before compute capability 8.0), and the fault of a wrong product.

    Row i of A is i % 8, column j of B is j % 4 - 2: every entry of C is `size` times their product, at most 16 `size`,
    which is exact in fp32 and, a small integer times a power of two, in bf16. fp16 ends at 65504.
    """
    dtype = torch.bfloat16
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # parts of a sum have more bits
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8:
            dtype, size = torch.float16, min(size, 4096)
    rows = (torch.arange(size, device=device) % 8).to(dtype)
    columns = (torch.arange(size, device=device) % 4 - 2).to(dtype)
    a, b = rows[:, None].expand(size, size).contiguous(), columns[None, :].expand(size, size).contiguous()
    product = torch.mm(a, b)
    off = torch.nonzero(product.double() != size * rows.double()[:, None] * columns.double()[None, :])
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))  # power as in training
    least_s = CLOCKS_S if device.type == "cuda" else 0.0
    rate = 2 * size**3 / best_time(lambda: torch.mm(a, b, out=product), device, least_s=least_s)
    if not len(off):
        return rate, None
    i, j = off[0].tolist()
    return rate, f"computes wrongly: {len(off)} of {size * size} entries, the first at ({i}, {j})"


def copy_memory(device: torch.device, size_bytes: int) -> float:
    """Bytes read and written a second by copies within the memory of the device."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / best_time(lambda: target.copy_(source), device)


def copy_to_peers(device: torch.device, size_bytes: int) -> tuple[dict[str, float], str | None]:
    """Bytes a second to each other GPU that this process sees and may use, and a copy that came out wrong."""
    rates: dict[str, float] = {}
    source = torch.arange(size_bytes // 8, dtype=torch.int64, device=device)
    for other in range(torch.cuda.device_count()):
        if other == device.index:
            continue
        try:
            target = torch.zeros_like(source, device=torch.device("cuda", other))
        except RuntimeError as error:
            if "busy or unavailable" in str(error):  # compute mode Exclusive_Process: it has a process already
                return {}, None
            raise

        def copy(target: torch.Tensor = target) -> None:
            target.copy_(source)
            torch.cuda.synchronize(target.device)

        rates[str(other)] = size_bytes / best_time(copy, device)
        if not torch.equal(target.cpu(), source.cpu()):
            return rates, f"copies wrongly to GPU {other}"
    return rates, None


def best_time(work: Callable[[], object], device: torch.device, *, least_s: float = 0.0) -> float:
    """Return the shortest of several rounds, in total at least `least_s` long, after a round that starts libraries."""
    seconds: list[float] = []
    while len(seconds) < 1 + ROUNDS or sum(seconds[1:]) < least_s:
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bus_id(device: torch.device) -> str | None:
    """As `nvidia-smi` and the kernel's Xid lines write it: ``0000:81:00.0``."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # torch before 2.7
        return None


def measure_gpu(group: RankGroup, sizes: Sizes) -> dict[str, Any]:
    """The figures of this rank's GPU; a collective call, since one GPU of a node at a time copies to its neighbours."""
    device = group.device
    flops, wrong = multiply(device, sizes.matrix)
    memory = copy_memory(device, sizes.memory_bytes)
    peers: dict[str, float] = {}
    for turn in range(group.env.local_world_size):
        group.barrier()
        if turn == group.env.local_rank and device.type == "cuda":
            peers, wrong_copy = copy_to_peers(device, sizes.peer_bytes)
            wrong = wrong or wrong_copy
    return {
        "host": group.hosts[group.rank],
        "index": device.index or 0 if device.type == "cuda" else group.env.local_rank,
        "bus_id": read_bus_id(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "flops": flops,
        "memory_bytes_per_s": memory,
        "wrong": wrong,
        "peers": peers,
    }


def measure_allreduce(group: RankGroup, most: int) -> dict[str, list[dict[str, float]]]:
    """Seconds by size: within nodes, all of them at once, and over all GPUs."""
    results = {}
    nodes = list(dict.fromkeys(group.hosts))
    members = {node: [rank for rank, host in enumerate(group.hosts) if host == node] for node in nodes}
    parts = {node: dist.new_group(ranks) for node, ranks in members.items()}
    mine = parts[group.hosts[group.rank]]
    name, local = group.backend, len(members[group.hosts[group.rank]])
    if local > 1:
        points = [time_sum(group, size, within=mine, ranks=local) for size in list_sizes(most)]
        results[f"{name} within nodes"] = points
    if len(nodes) > 1 or local == 1:
        points = [time_sum(group, size, within=None, ranks=group.world_size) for size in list_sizes(most)]
        results[f"{name} of {group.world_size} GPUs"] = points
    return results


def time_sum(group: RankGroup, size: int, *, within: dist.ProcessGroup | None, ranks: int) -> dict[str, float]:
    def reduce(values: torch.Tensor) -> None:
        dist.all_reduce(values, group=within)
        synchronize(values.device)

    return {"bytes": size, "seconds": measure(reduce, group, size, expected=ranks)}


def run_rank(flags: argparse.Namespace) -> int:
    """Run one process of the world, and return its exit code."""
    sizes = ON_CPU if flags.device == "cpu" else ON_GPU
    try:
        with join_world(DistEnv.from_environ(os.environ), device=flags.device, timeout_s=60) as group:
            figures = group.gather(measure_gpu(group, sizes))
            many = group.world_size > 1 and not flags.no_collectives
            allreduce = measure_allreduce(group, sizes.allreduce_bytes) if many else {}
            if group.rank == 0:
                flags.json.write_text(json.dumps({"gpus": figures, "allreduce": allreduce}))
    except TrainerError as error:
        return report(error)
    return 0


def describe_missing_gpus(visible: int, environ: Mapping[str, str]) -> str | None:
    """Return a message if Slurm gave the job more GPUs of this node than CUDA shows; None otherwise."""
    requested = gpus_on_node(environ)
    if visible >= requested or environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):  # CUDA shows one slice
        return None
    return f"{visible} of the job's {requested} GPUs are visible"


def start_ranks(flags: argparse.Namespace, count: int) -> int:
    """Start one process for each GPU of this node, and return the first exit code that is not 0."""
    node = DistEnv.from_environ(os.environ)
    port = find_free_port() if node.master_port is None else node.master_port + PORT_OFFSET
    common = {"MASTER_ADDR": node.master_addr, "MASTER_PORT": port, "WORLD_SIZE": node.world_size * count}
    processes = []
    for index in range(count):
        place = {
            "RANK": node.rank * count + index,
            "LOCAL_RANK": index,
            "LOCAL_WORLD_SIZE": count,
            "NODE_RANK": node.rank,
        }
        variables = {name: str(value) for name, value in {**common, **place}.items()}
        process = multiprocessing.get_context("spawn").Process(target=become_rank, args=(flags, variables))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
    return next((process.exitcode for process in processes if process.exitcode), 0)


def become_rank(flags: argparse.Namespace, variables: Mapping[str, str]) -> NoReturn:
    """Run one rank in a new process, without HPCJOBS_NTASKS: the job has one task per node, not per rank."""
    os.environ.pop("HPCJOBS_NTASKS", None)
    os.environ.update(variables)
    sys.exit(run_rank(flags))


def over_horovod(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by Horovod, started as in the trainer."""
    from hpcjobs.trainers.strategies.horovod import hvd, start

    name = start(group.env, group.hosts, controller="auto", share=group.from_first)
    return name, lambda values: hvd.allreduce_(values, op=hvd.Sum, name="sweep")


def over_mpi(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by MPI. Raises WorldMismatch if MPI cannot start on all ranks."""
    return "mpi", Mpi.of(group).sum


LEAST = 1 << 10
Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over all ranks, in place."""


def over_group(group: RankGroup) -> tuple[str, Reduce]:
    """All-reduce by torch.distributed, with the backend of the device."""

    def reduce(values: torch.Tensor) -> None:
        dist.all_reduce(values)
        synchronize(values.device)

    return group.backend, reduce


OVER = {"group": over_group, "horovod": over_horovod, "mpi": over_mpi}


def list_sizes(most: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB … up to ``most`` bytes."""
    byte_counts = [LEAST]
    while byte_counts[-1] * 4 <= most:
        byte_counts.append(byte_counts[-1] * 4)
    return byte_counts


def measure(reduce: Reduce, group: RankGroup, size: int, *, expected: int | None = None) -> float:
    """Seconds for one all-reduce of ``size`` bytes of fp32, on the slowest rank.

    Args:
        expected: the sum of ones [the world size].

    Raises:
        RendezvousError: the sum is wrong: not all ranks took part.
    """
    values = torch.ones(size // 4, device=group.device)
    worst = []
    for _ in range(1 + (10 if size <= 1 << 20 else 4)):
        values.fill_(1.0)
        group.barrier()
        began = time.perf_counter()
        reduce(values)
        worst.append(float(group.max(torch.tensor([time.perf_counter() - began], dtype=torch.float64))))
    ranks = group.world_size if expected is None else expected
    if not bool((values == ranks).all()):
        raise RendezvousError(f"a sum over {ranks} ranks came out as {values[0].item():g}")
    return min(worst[1:])  # the first one opens connections


def sweep(flags: argparse.Namespace) -> int:
    """Time all-reduces as one rank of a launch."""
    try:
        with join_world(DistEnv.from_environ(os.environ), device="auto", timeout_s=60) as group:
            name, reduce = OVER[flags.over](group)
            points = [{"bytes": size, "seconds": measure(reduce, group, size)} for size in list_sizes(flags.most)]
    except TrainerError as error:
        return report(error)
    if group.rank == 0:
        for point in points:
            print(f"{name}: {point['bytes']:>11,.0f} bytes {1e6 * point['seconds']:10.1f} µs")
        flags.json.write_text(json.dumps({"over": name, "world_size": group.world_size, "allreduce": points}))
    return 0


def _bytes(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * scale[text[-1]] if text[-1] in scale else int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="measure", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, help="[one for each GPU that is visible]")
    parser.add_argument("--no-collectives", action="store_true")
    parser.add_argument("--over", choices=list(OVER), help="time all-reduces alone, by this library")
    parser.add_argument("--most", type=_bytes, default="64M", help="largest of them; K and M are understood [64M]")
    flags = parser.parse_args(argv)
    if flags.over is not None:
        return sweep(flags)
    count = flags.processes or torch.cuda.device_count()
    if count == 0:
        print("error: no GPU is visible here", file=sys.stderr)
        return 1
    if flags.processes is None and (lack := describe_missing_gpus(count, os.environ)) is not None:
        print(f"error: on {socket.gethostname()}: {lack}", file=sys.stderr)
        return ExitCode.GPU_FAULT
    return start_ranks(flags, count)


if __name__ == "__main__":
    sys.exit(main())
