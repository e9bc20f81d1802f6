"""Locates the folder in which run folders are made."""

from __future__ import annotations

import os
from pathlib import Path
from string import Template

from hpcjobs.errors import RequestError
from hpcjobs.site.models import Site
from hpcjobs.user import user_name


def locate_run_root(site: Site, chdir: Path) -> Path:
    """The absolute ``run_root`` of ``site`` for a job that starts in ``chdir``; links are followed to see where it is.

    Raises:
        RequestError: a variable in it is not set here, or each node has a folder of its own there.
    """
    # Cron and containers often leave USER out.
    variables = {"USER": user_name(), **os.environ}
    text = Template(os.path.expanduser(site.run_root)).safe_substitute(variables)
    if "$" in text:
        raise RequestError(f"run_root {site.run_root!r} of site {site.name} ({site.path}): variable not set here")
    root = (chdir / text).absolute()
    real = root.resolve()
    for local in site.node_local:
        if site.scheduler == "slurm" and (root.is_relative_to(local) or real.is_relative_to(Path(local).resolve())):
            leads = "" if real == root else f" (which leads to {real})"
            raise RequestError(
                f"run folder {root}{leads} is in {local}, which is local to each node of site {site.name}",
                hint="submit from a folder that all nodes share, or set run_root in the site file",
            )
    return root
