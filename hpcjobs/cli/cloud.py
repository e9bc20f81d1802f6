"""``hpcjobs cloud``: clusters rented from a site's ``cloud:`` section."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.arguments import VerbGroup
from hpcjobs.cli.output import Json, SiteName, note, print_output, print_table
from hpcjobs.units import format_count

if TYPE_CHECKING:
    from hpcjobs.cloud.cluster import Cluster

app = typer.Typer(
    cls=VerbGroup,
    name="cloud",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Clusters rented from a site's cloud section: render, check, plan, up, down.",
)

Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="The cluster's folder [~/.local/state/hpcjobs/cloud/SITE].", show_default=False),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", "-N", help="Worker nodes to have [as many as there are; at first the site's nodes.min]."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def _cluster(site: str | None) -> Cluster:
    from hpcjobs.cloud.cluster import resolve_cluster
    from hpcjobs.site.library import default_site, load_site

    return resolve_cluster(load_site(site or default_site()))


@app.command()
def render(
    site: SiteName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write [./SITE].", show_default=False)
    ] = None,
    kind: Annotated[
        str, typer.Option(help="vms: Terraform for virtual machines; toolkit: Google's; soperator: Nebius'.")
    ] = "vms",
) -> None:
    """Write a folder from which Terraform, or the provider's own tool, builds the cluster. Nothing is built."""
    from typing import cast

    from hpcjobs.cloud import render as rendering

    cluster = _cluster(site)
    files = rendering.render(cluster, cast(rendering.Kind, kind))
    folder = out or Path(cluster.name if kind == "vms" else f"{cluster.name}-{kind}")
    wheel = rendering.wheel_of(cluster) if kind == "vms" else None
    rendering.write(files, folder, wheel)
    for name in (*files, *([wheel.name] if wheel else [])):
        print(folder / name)


@app.command()
def check(
    site: SiteName = None,
    folder: Folder = None,
    kind: Annotated[str, typer.Option(help="Kind of the files: vms, toolkit or soperator.")] = "vms",
    as_json: Json = False,
) -> None:
    """Report errors, risks and missing values, and estimate the cost, without network. Exit code 4 on errors."""
    from typing import cast

    from hpcjobs.cloud import render as rendering
    from hpcjobs.cloud.check import check as checked

    cluster = _cluster(site)
    files = rendering.render(cluster, cast(rendering.Kind, kind))
    if folder is not None:
        files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.tf*") if path.is_file()}
    report = checked(cluster, files, cast(rendering.Kind, kind))
    if as_json:
        print_output("cloud check", report)
    else:
        print_table(["LEVEL", "ABOUT", "FINDING"], [(f.level, f.about, f.text) for f in report.findings])
        cost = report.estimate
        if cost.per_hour is not None:
            hourly = f"{cost.per_hour:.2f} {cost.currency} an hour"
            print(f"estimate, by the site's own prices: {hourly} for {format_count(cost.nodes, 'node')}")
            print(f"  not in it: {', '.join(cost.left_out)}")
        print(f"checked offline against {report.checked_against}")
    raise typer.Exit(4 if report.failed else 0)


@app.command()
def plan(site: SiteName = None, folder: Folder = None, nodes: Nodes = None) -> None:
    """Show what `up` would build or change."""
    from hpcjobs.cloud import lifecycle

    note(f"planned in {lifecycle.plan(_cluster(site), folder, nodes=nodes)}; hpcjobs cloud up builds it")


@app.command()
def up(
    site: SiteName = None,
    folder: Folder = None,
    nodes: Nodes = None,
    yes: Yes = False,
    force: Annotated[bool, typer.Option("--force", help="Take nodes away even if jobs are in the queue.")] = False,
    first: Annotated[
        str | None,
        typer.Option("--run", metavar="COMMAND", help="Run `hpcjobs COMMAND` there when it is ready: 'submit ddp'."),
    ] = None,
) -> None:
    """Build the cluster, or change it to match the site file; write its address into your copy of the site file."""
    import shlex

    from hpcjobs.cloud import lifecycle
    from hpcjobs.cloud.head import HeadNode
    from hpcjobs.cloud.render import wheel_of

    cluster = _cluster(site)
    built = lifecycle.up(cluster, folder, nodes=nodes, confirmed=yes, force=force)
    head = HeadNode(built.ssh, built.folder)
    if (wheel := wheel_of(cluster)) is not None:
        head.deliver(wheel, note)
    lifecycle.print_next_steps(built, note)
    if first is not None:
        raise typer.Exit(head.run_when_ready(["hpcjobs", *shlex.split(first)], note))


@app.command()
def down(
    site: SiteName = None,
    folder: Folder = None,
    yes: Yes = False,
    force: Annotated[
        bool, typer.Option("--force", help="Take it down even if jobs run or the queue cannot be read.")
    ] = False,
) -> None:
    """Take the cluster down with its shared filesystem. Refused while jobs are in its queue."""
    from hpcjobs.cloud import lifecycle
    from hpcjobs.cloud.render import default_folder
    from hpcjobs.site.library import default_site

    out = folder or default_folder(Path(site or default_site()).stem)
    lifecycle.down(out, confirmed=yes, force=force)
