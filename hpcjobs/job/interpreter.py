"""Chooses the Python that runs a job's program, and the one that runs what decides about its attempts."""

from __future__ import annotations

import os
import sys

from hpcjobs.site.models import Site


def choose_python(site: Site) -> str:
    """The Python of programs, once the site's modules and environment are loaded."""
    if site.python is not None:
        return site.python
    # Not an absolute path: the activated environment puts its own first in PATH.
    return "python" if site.environment.conda or site.environment.venv else sys.executable


def choose_node_python(site: Site) -> str:
    """The Python of a node that needs neither modules nor an activated environment."""
    if site.node_python is not None:
        return site.node_python
    if site.scheduler == "local":
        return sys.executable
    environment = site.environment.venv or site.environment.conda
    named = site.python if site.python is not None or environment is None else f"{environment}/bin/python"
    return named if named is not None and os.path.isabs(named) else "/usr/bin/python3"
