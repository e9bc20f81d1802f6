"""``hpcjobs diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.output import JobSite, Json, print_output

if TYPE_CHECKING:
    from hpcjobs.run.difference import Change, Difference

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="Id, array task, run folder or name.", autocompletion=complete_jobs)],
    second: Annotated[str, typer.Argument(help="The other run.", autocompletion=complete_jobs)],
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """Show the differences between two runs: settings, environment, image, code, script, nodes, results."""
    from hpcjobs.run.difference import compare_runs
    from hpcjobs.run.select import select
    from hpcjobs.run.status import statuses

    entries = [select([name], site=site)[0] for name in (first, second)]
    difference = compare_runs(*statuses(entries))
    if as_json:
        print_output("diff", difference)
        return
    _print(difference, (entries[0].job_id, entries[1].job_id))


def _print(difference: Difference, ids: tuple[str, str]) -> None:
    if difference.is_empty:
        print(f"no difference between {ids[0]} and {ids[1]}")
        return
    print(f"{ids[0]} -> {ids[1]}")
    for section in ("settings", "environment", "image", "code", "nodes", "results"):
        rows: tuple[Change, ...] = getattr(difference, section)
        if rows:
            print(f"{section}:")
        for row in rows:
            print(f"  {describe_change(row)}")
    if difference.script:
        print("script:")
    for line in difference.script:
        print(f"  {line}")


def describe_change(change: Change) -> str:
    """``time: 01:00:00 -> 02:00:00``; of a text of several lines that it differs."""
    values = [_one_line(value) for value in (change.first, change.second)]
    return f"{change.name}: {values[0]} -> {values[1]}"


def _one_line(value: str | None) -> str:
    if not value:
        return "-"
    lines = value.count("\n") + 1
    text = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in value)
    return text if lines == 1 else f"({lines} lines)"
