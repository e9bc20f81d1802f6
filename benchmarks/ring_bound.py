"""How near does an all-reduce come to the bound of a ring, 2(n-1)/n · bytes / bandwidth?

python benchmarks/ring_bound.py [RANKS ...]    [2]; the bandwidth is what each rank sends to the next, all at once
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from harness import machine, parser_of

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.distributed import RankGroup, join_world

SIZES_MIB = (1, 8, 25, 100)
ROUNDS = 11


def seconds(group: RankGroup, action: Callable[[], object]) -> float:
    """The slowest rank's time, median over rounds."""
    samples = []
    for _ in range(ROUNDS + 1):
        group.barrier()
        began = time.perf_counter()
        action()
        samples.append(float(group.max(torch.tensor(time.perf_counter() - began, dtype=torch.float64))))
    return statistics.median(samples[1:])


def pass_on(group: RankGroup, out: torch.Tensor, into: torch.Tensor) -> None:
    """One hop of the ring on every rank at the same time."""
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    sent, received = dist.isend(out, after), dist.irecv(into, before)
    assert sent is not None
    assert received is not None
    sent.wait()
    received.wait()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("ranks", nargs="*", default=["2"], metavar="RANKS")
    counts = parser.parse_args().ranks
    if "RANK" not in os.environ:
        here = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return max(subprocess.run([*here, n, __file__], env=env).returncode for n in counts)
    with join_world(DistEnv.from_environ(os.environ), device="cpu", timeout_s=60) as group:
        n, cores = group.world_size, len(os.sched_getaffinity(0))
        group.log(f"\nall-reduce of {n} ranks over gloo{' (OVERSUBSCRIBED)' if n > cores else ''}\n{machine()}")
        for size in SIZES_MIB:
            out, into = torch.ones(size << 18), torch.empty(size << 18)
            hop = seconds(group, partial(pass_on, group, out, into))
            took = seconds(group, partial(dist.all_reduce, out))
            bandwidth = out.numel() * 4 / hop
            bound = 2 * (n - 1) / n * out.numel() * 4 / bandwidth
            group.log(
                f"{size:>4} MiB  {1e3 * took:8.2f} ms, bound {1e3 * bound:8.2f} ms at {bandwidth / 1e9:.2f} GB/s: "
                f"{took / bound:.2f} times the bound"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
