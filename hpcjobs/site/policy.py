"""The ``policy:`` of a centre: rules that no file of a user or project can override."""

from __future__ import annotations

from hpcjobs.site.checks import check_count, check_line, check_time_limit
from hpcjobs.site.frozen import Frozen
from hpcjobs.site.resources import Resources


class Policy(Frozen, frozen=True):
    """What every job of the cluster must keep to; only in the centre's files, and for all site files of the cluster."""

    partitions: tuple[str, ...] | None = None
    """Partitions that jobs may use; ``None``: all."""
    max_nodes: int | None = None
    """Nodes that one job may have."""
    max_gpus: int | None = None
    """GPUs that one job may have on all its nodes together."""
    max_time: str | None = None
    """Longest time limit of a job; a job without one is refused."""
    account_required: bool = False
    """Each job names an account."""
    accounts: tuple[str, ...] | None = None
    """Accounts that jobs may be charged to; ``None``: all."""
    mandatory: Resources = Resources()
    """What each job requests: added where it requests nothing, refused where it requests something else."""
    messages: tuple[str, ...] = ()
    """Lines that each submission prints."""

    def __post_init__(self) -> None:
        for field in ("max_nodes", "max_gpus"):
            if (count := getattr(self, field)) is not None:
                check_count(count, field, least=0 if field == "max_gpus" else 1)
        check_time_limit(self, "max_time")
        for field in ("partitions", "accounts", "messages"):
            for text in getattr(self, field) or ():
                check_line(text, field)


class AppliedPolicy(Frozen, frozen=True):
    """A policy that holds for a site, and the centre's file that has it."""

    path: str
    policy: Policy
    gpus_of_nodes: dict[str, int] = {}
    """Partition -> GPUs of a node that has most of them, as the centre's file describes it."""
    exclusive: tuple[str, ...] = ()
    """Partitions in which, by the centre's file, each job has its nodes for itself."""
