"""``hpcjobs show``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, clock, print_output

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def show(
    job: Annotated[
        str | None, typer.Argument(help="Id, array task, run folder or name [newest].", autocompletion=complete_jobs)
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Show one job: its state, its settings with the source of each, its results."""
    from hpcjobs.run.alarms import find_alarms
    from hpcjobs.run.describe import describe
    from hpcjobs.run.logs import paths
    from hpcjobs.run.select import newest, select
    from hpcjobs.units import human_bytes, human_duration

    status = describe(select([job], site=site, foreign=True)[0] if job is not None else newest(site=site))
    if as_json:
        print_output("show", status)
        return
    entry = status.entry
    print(f"job {entry.job_id}  {entry.name} on site {entry.site}, submitted {clock(entry.submitted)}")
    for record in status.records:
        facts = [record.state.value]
        if record.node_list:
            facts.append(f"on {record.node_list}")
        if record.elapsed_s is not None:
            facts.append(f"for {human_duration(record.elapsed_s)}")
        facts.extend(record.ending)
        if record.max_rss_bytes:
            facts.append(f"peak memory of a process {human_bytes(record.max_rss_bytes)}")
        print(f"  {record.job_id}: {', '.join(facts)}" + (f" ({record.reason})" if record.reason else ""))
    for number, past in enumerate(status.attempts, 1):
        lost = f", {past.lost} lost" if past.lost else ""
        print(
            f"  attempt {number}: {clock(past.started)} to {clock(past.ended)} on {past.nodes}, "
            f"{past.cause} at step {past.steps}{lost}; {past.decision}"
        )
    if status.first_failure is not None:
        first = status.first_failure
        print(f"  first failure: rank {first.rank} on {first.host}, exit code {first.exit_code}")
    if status.program:
        print(f"program: {status.program}")
    for key, (value, source) in status.settings.items():
        print(f"  {key} = {value}  ({source})")
    if status.code:
        print(f"code: {status.code}")
    if status.step is not None:
        print(f"progress: {status.step}")
    for node in status.monitor:
        print(f"  {node.host}: {node.sample}  ({human_duration(max(0.0, time.time() - node.taken))} ago)")
    for alarm in find_alarms(status.monitor):
        print(f"  alarm: {alarm.text}")
    if status.monitor:
        print(f"follow: hpcjobs logs --monitor -f {entry.job_id}")
    if status.results:
        print("results:")
    for key, result in status.results.items():
        style = "" if not isinstance(result, float) else ",.0f" if 1000 <= abs(result) < 1e15 else ".4g"
        print(f"  {key}: {result:{style}}")
    if entry.is_foreign:
        for path in paths(entry):
            print(f"log {path}")
    else:
        print(f"run folder {Path(entry.run_dir)}")
