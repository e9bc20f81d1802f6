"""``hpcjobs nodes``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcjobs.cli.output import Json, SiteName, clock, note, print_output, print_table

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def nodes(
    site: SiteName = None,
    clear: Annotated[
        list[str] | None,
        typer.Option("--clear", help="Remove the results of this node: submit uses it again.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the known bad nodes of a site: what was measured, and until when `submit` excludes them."""
    from hpcjobs.fabric.node_record import record_path
    from hpcjobs.job.fault_tolerance import clear_verdicts, read_standings
    from hpcjobs.site.library import default_site, load_site

    name = load_site(site or default_site()).name
    if clear:
        clear_verdicts(name, clear)
        note(f"cleared: {', '.join(clear)}")
        return
    standings = read_standings(name)
    if as_json:
        rows = [standing.last._asdict() | {"left_out_until": standing.avoided_until} for standing in standings.values()]
        print_output("nodes", {"record": str(record_path(name)), "nodes": rows})
        return
    if not standings:
        print(f"no verdicts in {record_path(name)}; hpcjobs fabric gives them")
        return
    table = [
        (node, last.verdict, clock(last.time), last.job_id or "-", clock(until), last.reason)
        for node, (last, _, until) in sorted(standings.items())
    ]
    print_table(["NODE", "VERDICT", "AT", "JOB", "LEFT OUT UNTIL", "WHY"], table)
