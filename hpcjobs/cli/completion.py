"""Values that the shell offers behind options and verbs; nothing is asked of a scheduler."""

from __future__ import annotations

import typer

NEWEST_JOBS = 50


def complete_sites(incomplete: str) -> list[str]:
    """Names of the known sites."""
    from hpcjobs.site.library import list_sites

    return [site.name for site in list_sites() if site.name.startswith(incomplete)]


def complete_partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions of the site that was typed, or of the default one; behind a comma a further one."""
    from hpcjobs.errors import HpcJobsError
    from hpcjobs.site.library import find_default_site, load_site

    first, comma, begin = incomplete.rpartition(",")
    try:
        site = ctx.params.get("site") or find_default_site()
        names = [] if site is None else list(load_site(site).partitions)
    except HpcJobsError:  # a site file that cannot be read has no partitions to offer
        return []
    return [first + comma + name for name in names if name.startswith(begin)]


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of the newest jobs, the newest first, and their names."""
    from hpcjobs.run import index

    newest = index.entries()[: -NEWEST_JOBS - 1 : -1]
    words = dict.fromkeys([*(entry.job_id for entry in newest), *(entry.name for entry in newest)])
    return [word for word in words if word.startswith(incomplete)]
