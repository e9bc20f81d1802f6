"""The ``jupyter:`` section of a site: where a session's server listens, and how one gets there."""

from __future__ import annotations

from typing import Literal

from hpcjobs.site.checks import check_duration
from hpcjobs.site.frozen import Frozen


class Jupyter(Frozen, frozen=True):
    """Sessions on this site (``hpcjobs jupyter``)."""

    bind: Literal["loopback", "address", "socket"] = "loopback"
    """``address``: the one that the node's name leads to, which the login node and every other node reach;
    ``socket``: a file on the node that only its owner opens."""
    tls: bool = False
    """Where a port is bound, the server speaks HTTPS by a certificate made for the session (by openssl, on the node);
    otherwise what goes from the login node to the worker is plain HTTP."""
    ssh_to_nodes: bool = False
    """Users may ssh to a node that runs their job; otherwise a step of the job carries the connection."""
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
