"""Fault tolerance of a job: retries, fewer nodes, nodes to avoid, and the check of the nodes before the start."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from hpcjobs.errors import RequestError, UnknownJobError, nearest
from hpcjobs.fabric import node_record
from hpcjobs.job.layers import Values
from hpcjobs.job.models import JobSpec
from hpcjobs.processes.modules import module_words
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.site.models import Partition, Site
from hpcjobs.site.resources import node_range
from hpcjobs.site.retries import WARNING_S, Retries, parse_retries
from hpcjobs.units import walltime_s


def resolve_retries(spec: JobSpec, site: Site, values: Values) -> tuple[Retries | None, int | None]:
    """Whether the job is started again, when it gets a signal before its limit, and Slurm's options of both."""
    retries = parse_retries(spec.retries or site.retries or "off")
    signal_before = spec.signal_before or site.signal_before
    signal_before_s = None if signal_before is None else walltime_s(signal_before)
    if retries is not None:
        values.default("requeue", True, "retries")
        # B: the batch shell alone gets it, since node.pyz decides when the ranks are signalled
        values.default("signal", f"B:USR1@{signal_before_s or WARNING_S}", "retries")
    return retries, signal_before_s


def preemption_messages(retries: Retries | None, partitions: Mapping[str, Partition]) -> tuple[str, ...]:
    """One for each partition that ends preempted jobs where the request has them start again."""
    if retries is None or not retries.preempt:
        return ()
    return tuple(
        f"--retries: partition {name} cancels a job whose nodes others need (PreemptMode=CANCEL): Slurm does not"
        " start it again"
        for name, partition in partitions.items()
        if partition.preemptible == "cancel"
    )


def resolve_elastic(spec: JobSpec, values: Values, *, launcher: str, retries: Retries | None) -> None:
    """Whether the job can lose nodes and continue; then Slurm needs ``--no-kill``."""
    if spec.min_nodes is None:
        return
    if launcher != "torchrun":
        raise RequestError(
            f"min_nodes={spec.min_nodes}: launcher {launcher} cannot continue with fewer nodes",
            hint="use --launcher torchrun",
        )
    if retries is None:
        raise RequestError(
            f"min_nodes={spec.min_nodes}: it needs --retries, which the job does not have", hint="add --retries on"
        )
    if spec.min_nodes >= node_range(values["nodes"])[0]:
        raise RequestError(f"min_nodes={spec.min_nodes} must be less than nodes={values['nodes']}")
    values.default("no_kill", True, "min_nodes")


def avoided_on(site: str) -> dict[str, str]:
    """The nodes to leave out now, and why, as the site's record has it."""
    return {
        node: f"{standing.last.reason} (job {standing.last.job_id}, {time.strftime('%F %H:%M', _local(standing))})"
        for node, standing in node_record.find_avoided(node_record.record_path(site), time.time()).items()
    }


def _local(standing: node_record.Standing) -> time.struct_time:
    return time.localtime(standing.last.time)


def named_nodes(nodelist: str | None) -> set[str]:
    """The nodes that ``--nodelist`` names; none where it names a file of them, as it may (anything with a ``/``).

    Raises:
        RequestError: it is no list of hosts.
    """
    if not nodelist or "/" in nodelist:
        return set()
    try:
        return set(hosts_of(nodelist))
    except ValueError as error:
        raise RequestError(f"nodelist {nodelist!r}: {error}", hint="such as n1,n[03-05]") from error


def still_left_out(
    avoid: Mapping[str, str], *, nodes: int, nodelist: str | None, available: int | None
) -> dict[str, str]:
    """Those of ``avoid`` that the job can do without: none that it names, none if too few are ``available``."""
    named = named_nodes(nodelist)
    avoided = {node: why for node, why in avoid.items() if node not in named}
    too_few = available is not None and available - len(avoided) < nodes
    return {} if too_few else avoided


def read_standings(site: str) -> dict[str, node_record.Standing]:
    """Every node that there is a verdict on."""
    return node_record.standings(node_record.read(node_record.record_path(site)), time.time())


def clear_verdicts(site: str, nodes: Iterable[str]) -> None:
    """Forget what is held against ``nodes``.

    Raises:
        UnknownJobError: there is no verdict on one of them; then nothing is forgotten.
    """
    requested, known = list(nodes), read_standings(site)
    for node in requested:
        if node not in known:
            raise UnknownJobError(
                f"node {node!r} has no record in {node_record.record_path(site)}", hint=nearest(node, known)
            )
    node_record.append(
        node_record.record_path(site),
        [node_record.NodeVerdict(node, node_record.CLEARED, time.time()) for node in requested],
    )


REHEARSED_TOLERANCE = "0.8"
"""The nodes of a sandbox share the cores of one machine: how fast they are next to each other says little."""


def check_words(site: Site, *, cpus_per_task: object) -> tuple[str, ...]:
    """What the check must know of a site, and of what each of its tasks may compute with."""
    arguments = ["--record", str(node_record.record_path(site.name))]
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
