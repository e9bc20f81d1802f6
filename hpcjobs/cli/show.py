"""``hpcjobs show``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, clock, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command()
def show(
    job: Annotated[
        str | None, typer.Argument(help="Id, array task, run folder or name [newest].", autocompletion=complete_jobs)
    ] = None,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """One job: its state, its resolved settings with the source of each, its results."""
    from hpcjobs.run.describe import describe
    from hpcjobs.run.select import newest, select
    from hpcjobs.units import human_bytes, human_duration

    told = describe(select([job], site=site)[0] if job is not None else newest(site=site))
    if as_json:
        print_json(told._asdict())
        return
    entry = told.entry
    print(f"job {entry.job_id}  {entry.name} on site {entry.site}, submitted {clock(entry.submitted)}")
    for record in told.records:
        facts = [record.state.value]
        if record.node_list:
            facts.append(f"on {record.node_list}")
        if record.elapsed_s is not None:
            facts.append(f"for {human_duration(record.elapsed_s)}")
        facts.extend(record.ending)
        if record.max_rss_bytes:
            facts.append(f"peak memory {human_bytes(record.max_rss_bytes)}")
        print(f"  {record.job_id}: {', '.join(facts)}" + (f" ({record.reason})" if record.reason else ""))
    for number, past in enumerate(told.attempts, 1):
        lost = f", {past.lost} lost" if past.lost else ""
        print(
            f"  attempt {number}: {clock(past.started)} to {clock(past.ended)} on {past.nodes}, "
            f"{past.cause} at step {past.steps}{lost}; {past.decision}"
        )
    if told.first_failure is not None:
        first = told.first_failure
        print(f"  first failure: rank {first.rank} on {first.host}, exit code {first.exit_code}")
    print(f"program: {told.program}")
    for key, (value, source) in told.settings.items():
        print(f"  {key} = {value}  ({source})")
    if told.code:
        print(f"code: {told.code}")
    if told.step is not None:
        print(f"progress: {told.step}")
    for node in told.monitor:
        print(f"  {node.host}: {node.sample}  ({human_duration(max(0.0, time.time() - node.taken))} ago)")
    if told.monitor:
        print(f"follow: hpcjobs logs --monitor -f {entry.job_id}")
    if told.results:
        print("results:")
    for key, value in told.results.items():
        print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")
    print(f"run folder {Path(entry.run_dir)}")
