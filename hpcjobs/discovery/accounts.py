"""Accounts and QOS of the user, from sacctmgr."""

from __future__ import annotations

from collections.abc import Iterator

from hpcjobs.discovery.facts import Association, Qos
from hpcjobs.discovery.slurm_config import read_limit, split_list
from hpcjobs.scheduler.slurm.table import TableRow

ASSOCIATION = ("Cluster", "Account", "Partition", "QOS", "DefaultQOS", "MaxSubmitJobs")
QOS = ("Name", "MaxWall", "MaxSubmitJobsPerUser")


def parse_associations(out: str, cluster: str | None) -> tuple[Association, ...]:
    """The associations of ``cluster``; the accounting may hold those of several."""
    return tuple(
        Association(
            account=row.raw("Account"),
            partition=row.name("Partition"),
            qos=split_list(row.raw("QOS")),
            default_qos=row.name("DefaultQOS"),
            max_submit_jobs=row.count("MaxSubmitJobs"),
        )
        for row in _rows(out, ASSOCIATION)
        if row.raw("Account") and cluster in (None, row.raw("Cluster"))
    )


def parse_qos(out: str) -> tuple[Qos, ...]:
    """Every QOS with its longest time and its jobs per user."""
    return tuple(
        Qos(name, read_limit(row.name("MaxWall"), f"MaxWall of QOS {name}"), row.count("MaxSubmitJobsPerUser"))
        for row in _rows(out, QOS)
        if (name := row.raw("Name"))
    )


def parse_default_account(out: str) -> str | None:
    """The account of jobs that name none."""
    return out.strip().splitlines()[0] if out.strip() else None


def _rows(out: str, columns: tuple[str, ...]) -> Iterator[TableRow]:
    for line in out.splitlines():
        values = line.strip().split("|")
        if len(values) == len(columns):
            yield TableRow(dict(zip(columns, values, strict=True)))
