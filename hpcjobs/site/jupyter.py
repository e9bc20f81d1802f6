"""The ``jupyter:`` section of a site: what a session runs, and how one gets there."""

from __future__ import annotations

from hpcjobs.site.checks import check_duration
from hpcjobs.site.frozen import Frozen


class Jupyter(Frozen, frozen=True):
    """Sessions on this site (``hpcjobs jupyter``)."""

    REMOVED = dict.fromkeys(
        ("bind", "tls"),
        "delete it: a session listens at a socket that only you can open, and no longer at a port of the node "
        "(docs/jupyter.md, How to connect)",
    )
    """Keys of earlier versions, and what to do about each."""
    ssh_to_nodes: bool = False
    """Users may ssh to a node that runs their job, and see the job's /tmp there; otherwise a step of the job carries
    the connection."""
    python: str | None = None
    """Python that has Jupyter, on the node; ``None``: the site's."""
    kernels: dict[str, str] = {}
    """Name -> Python on the node (``$VARIABLES`` and ``~`` are expanded there), or ``conda:NAME``: environments to
    choose from."""
    idle: str | None = "2h"
    """A session ends after this time without any user or kernel activity; null: never."""
    hpcjobs: str = "hpcjobs"
    """What a laptop runs on the login node (``--connect``): words of a shell."""

    def __post_init__(self) -> None:
        check_duration(self.idle, "idle")
