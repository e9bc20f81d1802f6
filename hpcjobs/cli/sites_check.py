"""``hpcjobs sites check``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_sites
from hpcjobs.cli.output import Json, note, print_output, print_table
from hpcjobs.cli.signals import exit_on_signals


def check(
    name: Annotated[
        str | None,
        typer.Argument(help="Site name or file [the default site].", show_default=False, autocompletion=complete_sites),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Run a small job per partition and launcher too.")] = False,
    time: Annotated[str, typer.Option("-t", "--time", help="Time limit of these jobs.")] = "5m",
    timeout: Annotated[str, typer.Option(help="How long to wait for these jobs; then they are cancelled.")] = "30m",
    as_json: Json = False,
) -> None:
    """Compare a site file with the live cluster: what works, what does not, why, what to change; exit code 0 or 1."""
    from functools import partial

    from hpcjobs.discovery.compare import compare, list_untried, unusable_partitions
    from hpcjobs.discovery.read import read_cluster
    from hpcjobs.discovery.trial import run_trials
    from hpcjobs.errors import RequestError
    from hpcjobs.processes.programs import run as run_program
    from hpcjobs.scheduler.slurm.client import SlurmScheduler
    from hpcjobs.site.library import default_site, load_site
    from hpcjobs.units import walltime_s

    site = load_site(name or default_site())
    try:
        timeout_s = walltime_s(timeout)
    except ValueError as error:
        raise RequestError(f"--timeout {timeout}: not a time", hint="write 30m or 2h") from error
    if site.scheduler != "slurm":
        raise RequestError(f"site {site.name} ({site.path}) has no Slurm to compare it with")
    runner = partial(run_program, env={"SLURM_CONF": site.slurm_conf}) if site.slurm_conf else run_program
    findings = compare(site, read_cluster(SlurmScheduler(site.slurm_conf), runner))
    if not run:
        findings += list_untried(site)
    else:
        exit_on_signals()
        unusable = unusable_partitions(findings)
        findings += run_trials(site, site.name, time=time, timeout_s=timeout_s, without=unusable, report=note)
    is_wrong = any(finding.verdict == "wrong" for finding in findings)
    if as_json:
        rows = [finding._asdict() for finding in findings]
        print_output("sites check", {"site": site.name, "path": site.path, "ok": not is_wrong, "findings": rows})
    else:
        print_table(["CHECK", "", "WHAT", "CHANGE"], [(f.subject, f.verdict, f.text, f.change) for f in findings])
    raise typer.Exit(int(is_wrong))
