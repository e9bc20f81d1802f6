"""Queries the live cluster."""

from __future__ import annotations

import contextlib
import grp
import os

from hpcjobs.discovery.accounts import (
    associations_command,
    default_account_command,
    parse_associations,
    parse_default_account,
    parse_qos,
    qos_command,
)
from hpcjobs.discovery.facts import Accounting, ClusterFacts, NodeFacts
from hpcjobs.discovery.slurm_config import NodeReader, mean_nodes, parse_config, parse_licenses, parse_partitions
from hpcjobs.discovery.software import MODULES_COMMAND, container_runtimes, parse_modules, parse_mpi_types
from hpcjobs.errors import CommandMissingError, SchedulerError
from hpcjobs.processes.programs import Result, Runner, run
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.user import user_name

CONFIG = ("scontrol", "show", "config")
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
NODES = ("scontrol", "--all", "--oneliner", "show", "node")
LICENSES = ("scontrol", "--oneliner", "show", "licenses")
MPI_LIST = ("srun", "--mpi=list")
SRUN_HELP = ("srun", "--help")
SACCT = ("sacct", "--noheader", "--parsable2", "--starttime=now", "--format=JobID")


def read_cluster(slurm: SlurmScheduler, runner: Runner = run) -> ClusterFacts:
    """Ask the cluster of this login node.

    Raises:
        SchedulerError: Slurm does not answer, or refuses the questions without which there is no site file:
            configuration and partitions.
    """
    config = parse_config(slurm.query(CONFIG))
    partitions = slurm.query(PARTITIONS)
    nodes = _read_nodes(slurm)
    types = _run(runner, MPI_LIST)
    modules = _run(runner, MODULES_COMMAND)
    return ClusterFacts(
        config=config,
        partitions=parse_partitions(partitions),
        nodes=mean_nodes(partitions) if nodes is None else nodes,
        nodes_are_hidden=nodes is None,
        accounting=_read_accounting(slurm, config.cluster),
        mpi_types=parse_mpi_types(types.out + types.err) or None if types is not None else None,
        modules=parse_modules(modules.out) if modules is not None else None,
        runtimes=container_runtimes(help_text.out if (help_text := _run(runner, SRUN_HELP)) is not None else ""),
        user_groups=_group_names(),
        host=os.uname().nodename,
        slurm_conf=os.environ.get("SLURM_CONF") or None,
        licenses=None if (licenses := _query(slurm, LICENSES)) is None else parse_licenses(licenses),
    )


def _read_nodes(slurm: SlurmScheduler) -> tuple[NodeFacts, ...] | None:
    """What scontrol shows of nodes; None: this user may not see them."""
    reader = NodeReader()
    if slurm.follow(NODES, reader.read) == 0:
        return reader.nodes()
    if "permission denied" in "\n".join(reader.messages).lower():
        return None
    again = NodeReader()  # a busy controller is asked again, and an error is raised
    for line in slurm.query(NODES).splitlines():
        again.read(line)
    return again.nodes()


def _read_accounting(slurm: SlurmScheduler, cluster: str | None) -> Accounting:
    user = user_name()
    associations = _query(slurm, associations_command(user))
    account = _query(slurm, default_account_command(user)) if associations else None
    qos = _query(slurm, qos_command()) if associations else None
    return Accounting(
        associations=None if associations is None else parse_associations(associations, cluster),
        default_account=None if account is None else parse_default_account(account),
        qos=None if qos is None else parse_qos(qos),
        sacct_answers=_query(slurm, SACCT) is not None,
    )


def _query(slurm: SlurmScheduler, argv: list[str] | tuple[str, ...]) -> str | None:
    """What the command prints; None: it is missing, is forbidden or there is no accounting. A question says so."""
    try:
        return slurm.query(argv)
    except SchedulerError:
        return None


def _run(runner: Runner, argv: tuple[str, ...]) -> Result | None:
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
