"""Queries the live cluster."""

from __future__ import annotations

import contextlib
import grp
import os
from collections.abc import Sequence

from hpcjobs import slurm_commands
from hpcjobs.discovery.facts import Accounting, ClusterFacts, NodeFacts
from hpcjobs.discovery.slurm_config import (
    ASSOCIATION,
    QOS,
    NodeReader,
    mean_nodes,
    parse_associations,
    parse_config,
    parse_default_account,
    parse_licenses,
    parse_partitions,
    parse_qos,
)
from hpcjobs.discovery.software import MODULES_COMMAND, container_runtimes, parse_modules, parse_mpi_types
from hpcjobs.errors import CommandMissingError, SchedulerError
from hpcjobs.processes.programs import Result, Runner, run
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.user import user_name


def read_cluster(slurm: Scheduler, runner: Runner = run) -> ClusterFacts:
    """Ask the cluster of this login node.

    Raises:
        SchedulerError: Slurm does not answer, or refuses the questions without which there is no site file:
            configuration and partitions.
    """
    config = parse_config(slurm.query(slurm_commands.show_config()))
    partitions = slurm.query(slurm_commands.show_partitions())
    nodes = _read_nodes(slurm)
    types = _run(runner, slurm_commands.list_mpi_types())
    modules = _run(runner, MODULES_COMMAND)
    step_options = _run(runner, slurm_commands.show_step_options())
    licenses = _query(slurm, slurm_commands.show_licenses())
    return ClusterFacts(
        config=config,
        partitions=parse_partitions(partitions),
        nodes=mean_nodes(partitions) if nodes is None else nodes,
        nodes_are_hidden=nodes is None,
        accounting=_read_accounting(slurm, config.cluster),
        mpi_types=parse_mpi_types(types.out + types.err) or None if types is not None else None,
        modules=parse_modules(modules.out) if modules is not None else None,
        runtimes=container_runtimes("" if step_options is None else step_options.out),
        user_groups=_group_names(),
        host=os.uname().nodename,
        slurm_conf=os.environ.get("SLURM_CONF") or None,
        licenses=None if licenses is None else parse_licenses(licenses),
    )


def _read_nodes(slurm: Scheduler) -> tuple[NodeFacts, ...] | None:
    """Nodes from scontrol; None: this user may not see them."""
    reader = NodeReader()
    if slurm.follow(slurm_commands.show_nodes(), reader.read) == 0:
        return reader.nodes()
    if "permission denied" in "\n".join(reader.messages).lower():
        return None
    again = NodeReader()  # a busy controller is asked again, and an error is raised
    for line in slurm.query(slurm_commands.show_nodes()).splitlines():
        again.read(line)
    return again.nodes()


def _read_accounting(slurm: Scheduler, cluster: str | None) -> Accounting:
    user = user_name()
    associations = _query(slurm, slurm_commands.list_associations(ASSOCIATION, user=user))
    account = _query(slurm, slurm_commands.show_default_account(user)) if associations else None
    qos = _query(slurm, slurm_commands.list_qos(QOS)) if associations else None
    return Accounting(
        associations=None if associations is None else parse_associations(associations, cluster),
        default_account=None if account is None else parse_default_account(account),
        qos=None if qos is None else parse_qos(qos),
        sacct_answers=_query(slurm, slurm_commands.check_accounting()) is not None,
    )


def _query(slurm: Scheduler, argv: Sequence[str]) -> str | None:
    """Output of the command; None: it is missing or forbidden, or accounting is off. A question reports that."""
    try:
        return slurm.query(argv)
    except SchedulerError:
        return None


def _run(runner: Runner, argv: Sequence[str]) -> Result | None:
    try:
        return runner(argv)
    except CommandMissingError:
        return None


def _group_names() -> frozenset[str]:
    """Names of this process's groups; a group without a name admits to no partition."""
    names = set()
    for gid in {*os.getgroups(), os.getegid()}:
        with contextlib.suppress(KeyError):
            names.add(grp.getgrgid(gid).gr_name)
    return frozenset(names)
