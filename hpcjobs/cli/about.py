"""``hpcjobs doctor`` and ``skill``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.output import SiteName

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    site: SiteName = None,
    run: Annotated[bool, typer.Option("--run", help="Run a job of one task too, and examine its node.")] = False,
) -> None:
    """Examine this installation: versions, site files, Slurm, containers, folders, clock; exit code 0 or 1.

    The text is for a bug report: it has no value of a variable and no name of a user.
    """
    from hpcjobs.discovery.installation import examine, without_names

    is_wrong = False
    for finding in examine(site, run_job=run):
        is_wrong = is_wrong or finding.verdict == "wrong"
        print(f"{finding.subject:12}{finding.verdict:9}{without_names(finding.text)}", flush=True)
    raise typer.Exit(int(is_wrong))


READING = frozenset(
    [
        "where",
        "ps",
        "top",
        "logs",
        "show",
        "wait",
        "why",
        "diff",
        "report",
        "monitor",
        "sites",
        "completion",
        "doctor",
        "skill",
        "help",
    ]
)
"""Verbs that neither submit nor change a job (``sites init``, ``sites trust`` and ``doctor --run`` aside)."""
_TEXT = """\
---
name: hpcjobs
description: Submit, follow and explain jobs of Slurm clusters and of this machine by the command line hpcjobs.
---

# hpcjobs {version}

- Set limits first: `export HPCJOBS_BUDGET=jobs=5,gpu_hours=10`, or `export HPCJOBS_READ_ONLY=1` to change nothing.
- Before you submit: `submit --dry-run --json` gives the script, `submit --explain --json` the source of each value.
- Submit with `hpcjobs submit --json [OPTIONS] PROGRAM [ARGS]`: options come first. Keep the `job_id` of the answer.
- Wait with `hpcjobs wait --json JOB`: the exit code is the job's. Do not poll `ps` in a loop.
- After a failure read `hpcjobs why --json JOB` before you submit again.
- Standard output has only the JSON; notes are on standard error. `hpcjobs skill --schema 'ps'` prints a JSON Schema.
- `hpcjobs VERB --help` has every option. Ids of this machine begin with L, those of Slurm are numbers.

## Verbs

| verb | changes jobs | what it does |
|---|---|---|
{verbs}
## JSON

`--json` is an option of:

{outputs}
## Exit codes

| code | meaning |
|---|---|
{codes}"""


def skill_text() -> str:
    """SKILL.md, from the verbs, the types of their JSON and the error classes."""
    from hpcjobs import __version__
    from hpcjobs.cli import VERBS
    from hpcjobs.cli.json_output import OUTPUTS
    from hpcjobs.errors import list_exit_codes

    rows = (f"| `{verb}` | {'no' if verb in READING else 'yes'} | {text} |\n" for verb, (_, text) in VERBS.items())
    codes = (f"| {code} | {text} |\n" for code, text in list_exit_codes().items())
    outputs = (f"- `{verb}`\n" for verb in OUTPUTS)
    return _TEXT.format(version=__version__, verbs="".join(rows), outputs="".join(outputs), codes="".join(codes))


@app.command()
def skill(
    schema: Annotated[
        str | None, typer.Option("--schema", help="Print instead the JSON Schema of what a verb prints as JSON.")
    ] = None,
) -> None:
    """Print SKILL.md: verbs, which of them change jobs, JSON, exit codes: hpcjobs skill >SKILL.md."""
    if schema is None:
        sys.stdout.write(skill_text())
        return
    import json

    from hpcjobs.cli.json_output import OUTPUTS
    from hpcjobs.cli.json_output import schema as schema_of
    from hpcjobs.errors import nearest

    if schema not in OUTPUTS:
        raise CommandLineError(f"no JSON of {schema!r}; {nearest(schema, OUTPUTS)}")
    print(json.dumps(schema_of(schema), indent=2))
