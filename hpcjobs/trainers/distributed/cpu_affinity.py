"""Reports which cores the ranks run on, and whether there are enough of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import groupby


def format_cores(cores: Set[int]) -> str:
    """Format cores 0, 1, 2, 5 as `0-2,5`, as taskset does."""
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def describe_shared_cores(hosts: Sequence[str], ranks: Sequence[tuple[int, Set[int]]]) -> Iterator[str]:
    """A line for each host whose ranks have more threads than cores; `ranks` are threads and allowed cores by rank."""
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
