"""A look at the nodes, by `hpcjobs.fabric.check`, before anything else runs on them."""

from __future__ import annotations

from hpcjobs.job.avoid import record_of
from hpcjobs.processes.modules import module_words
from hpcjobs.site.models import Site

REHEARSED_TOLERANCE = "0.8"
"""The nodes of a sandbox share the cores of one machine: how fast they are next to each other says little."""


def check_words(site: Site, *, cpus_per_task: object) -> tuple[str, ...]:
    """What the check must know of a site, and of what each of its tasks may compute with."""
    arguments = ["--record", str(record_of(site.name))]
    for flag, value in (("--interface", site.interface), ("--mpi", site.mpi), ("--suffix", site.address_suffix)):
        arguments += [flag, value] if value else []
    arguments += ["--tolerance", REHEARSED_TOLERANCE] if site.rehearsal else []
    arguments += ["--cpus-per-task", str(cpus_per_task)] if isinstance(cpus_per_task, int) else []
    return tuple(arguments)


def preflight_words(
    site: Site, *, python: str, cpus_per_task: object, nodes: int | None, launcher: str
) -> tuple[str, ...]:
    """The command in the job's own script; with ``nodes``, it chooses so many of the allocation's.

    mpirun takes the node that it is started on for the first of those it is to use.
    """
    chosen: tuple[str, ...] = () if nodes is None else ("--choose", str(nodes))
    chosen += ("--keep-first",) if chosen and launcher == "mpirun" else ()
    arguments = check_words(site, cpus_per_task=cpus_per_task)
    return (python, "-u", *module_words("hpcjobs.fabric.check"), "--quick", *arguments, *chosen)
