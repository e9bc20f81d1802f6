"""``hpcjobs help``, ``doctor`` and ``skill``."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs import __version__
from hpcjobs.cli import VERBS
from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.output import SiteName, opt
from hpcjobs.data import data_folder
from hpcjobs.errors import list_exit_codes, nearest

app = typer.Typer(rich_markup_mode=None, add_completion=False)

_SECTIONS = dict.fromkeys(("budget", "read_only"), ("workflows.md", "Limits for agents and scripts"))
"""Topics that are a section of a page."""
_PURPOSE = re.compile(r"After (?:reading this page|this tutorial) you can (.*?[^.])(?:\.\s|\.$|: |$)", re.MULTILINE)


def _complete(incomplete: str) -> list[str]:
    return [name for name in (*VERBS, *_list_topics()) if name.startswith(incomplete)]


@app.command(name="help")
def explain(
    context: typer.Context,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND|TOPIC]...", autocompletion=_complete, show_default=False)
    ] = None,
) -> None:
    """Explain a command by its options, or print a topic: `hpcjobs help topics` lists them."""
    root = context.find_root()
    if not names:
        print(root.get_help())
    elif names[0] in VERBS:
        root.command.main([*names, "--help"], prog_name="hpcjobs")
    else:
        _print_topic(names[0])


def _list_topics() -> dict[str, Path]:
    """Name of each topic -> its page; the tutorials are topics too, and ``sites.md`` is not the verb ``sites``."""
    pages = data_folder("docs")
    return {
        "topics": Path(),
        "exit_codes": Path(),
        **dict.fromkeys(_SECTIONS, Path()),
        **{page.name if page.stem in VERBS else page.stem: page for page in sorted(pages.glob("*.md"))},
        **{f"tutorials/{page.stem}": page for page in sorted(pages.glob("tutorials/*.md"))},
    }


def _print_topic(name: str) -> None:
    """Print the page of a topic: formatted and by a pager on a terminal, as Markdown elsewhere.

    Raises CommandLineError: neither a command nor a topic has this name.
    """
    topics = _list_topics()
    name = name.replace("-", "_")
    name = name if name in topics else name.lower().removeprefix("hpcjobs_")
    name = name if name in topics else name.removesuffix(".md")
    if name not in topics:
        raise CommandLineError(f"no command or topic {name!r}; {nearest(name, [*VERBS, *topics])}")
    if name == "topics":
        text = _describe(topics)
    elif name == "exit_codes":
        rows = (f"| {code} | {meaning} |" for code, meaning in list_exit_codes().items())
        text = "\n".join(["# Exit codes", "", "| code | meaning |", "|---|---|", *rows, ""])
    elif name in _SECTIONS:
        page, title = _SECTIONS[name]
        text = (
            f"# {title}\n"
            + topics[Path(page).stem].read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
        )
    else:
        text = topics[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(Console().width, 100))
    os.environ.setdefault("LESS", "-FRX")  # as git does: colours, and no pager for text that fits on the screen
    with console.pager(styles=console.color_system is not None):
        console.print(Markdown(text))


def _describe(topics: dict[str, Path]) -> str:
    lines = ["# Topics", "", "`hpcjobs help TOPIC` prints the page of a topic, `hpcjobs help COMMAND` the options.", ""]
    for name, page in topics.items():
        if page.name and (purpose := _PURPOSE.search(" ".join(page.read_text(encoding="utf-8").split("\n")[:8]))):
            lines.append(f"- **{name}**: {purpose[1]}")
    limits = f"- **{', '.join(_SECTIONS)}**: limit what may be submitted or changed"
    return "\n".join([*lines, limits, "- **exit_codes**: look up what an exit code of hpcjobs means", ""])


@app.command()
def doctor(
    site: SiteName = None,
    run: Annotated[bool, opt("--run", help="Run a job of one task too, and examine its node.")] = False,
) -> None:
    """Examine this installation: versions, site files, Slurm, containers, folders, clock; exit code 0 or 1.

    The text is for a bug report: your name is USER in it, your home folder ~. It has paths of folders and names of
    sites, also those that variables name, so read it before you send it.
    """
    from hpcjobs.discovery.installation import examine, without_names

    is_wrong = False
    for finding in examine(site, run_job=run):
        is_wrong = is_wrong or finding.verdict == "wrong"
        print(f"{finding.subject:12}{finding.verdict:9}{without_names(finding.text)}", flush=True)
    raise typer.Exit(int(is_wrong))


_REFUSED = {
    **dict.fromkeys(("submit", "rerun", "sweep", "scale", "alloc", "jupyter", "fabric", "drill"), "submits jobs"),
    **dict.fromkeys(("cancel", "hold", "release", "requeue", "update"), "changes jobs"),
    **dict.fromkeys(("shell", "exec"), "runs a program in a job"),
    "monitor": "runs a sampler in a job; cancels it, with --cancel-idle",
    "top": "cancels jobs and opens shells, by keys",
    "prune": "removes run folders, with --remove",
    "cloud": "rents machines: up, down",
    "doctor": "submits one job, with --run",
}
"""Verb -> change, for verbs that may not make it in a read-only environment."""
CHANGES = {
    **_REFUSED,
    "container": "builds images: build; with --submit in a job, which is refused",
    "sandbox": "starts and stops a Slurm of its own: up, down",
    "init": "writes hpcjobs.yaml",
    "sites": "writes a site file: init, trust",
    "nodes": "changes the list of bad nodes",
    "archive": "writes a file",
    "fetch": "writes a copy of a run folder",
}
"""Verb -> change, for verbs that do more than read."""
REFUSED_READ_ONLY = frozenset(_REFUSED)
"""Verbs that may not make their change in a read-only environment."""
_TEXT = """\
---
name: hpcjobs
description: Submit, follow and explain jobs of Slurm clusters and of this machine by the command line hpcjobs.
---

# hpcjobs {version}

## Rules

- Set limits first: `export HPCJOBS_BUDGET=jobs=5,gpu_hours=10` (also `node_hours`, `cpu_hours`), or `export
  HPCJOBS_READ_ONLY=1` to change nothing. Do not unset or change them.
- A budget counts the most that a job may use: nodes x GPUs x time limit x array tasks x attempts. So name a time
  limit (`-t 10m`), and bound `--retries` (`--retries timeout=2,preempt=2,node=1,error=0`, not `on`). What is over
  the budget is refused, exit code 5.
- Before you submit: `submit --dry-run --json` gives the script, `submit --explain --json` the source of each
  value, `where --json PROGRAM` the partitions that fit.
- Submit with `hpcjobs submit --json [OPTIONS] PROGRAM [ARGS]`: options come first, all words behind PROGRAM are
  the program's. Keep the `job_id` of the answer. `--site NAME` chooses the cluster, `--site local` this machine;
  `sites --json` lists them.
- Wait with `hpcjobs wait --json JOB`: the exit code is the job's. Do not poll `ps` in a loop. `wait --timeout 10m`
  ends earlier, with exit code 3.
- `logs --json JOB` has the output, `show --json JOB` the settings and results, `ps -a --json` the jobs that have
  ended too.
- After a failure read `hpcjobs why --json JOB` before you submit again: `cause`, `line`, and `fix`, the advice.
- A job without an answer (exit code 8, `maybe_taken`) may run: look with `ps --json` before you submit it again.
- Exit code 143 of a job: it was cancelled, or its time limit was over. `show --json JOB` has the state.
- Of a sweep wait for each id of `arrays`, which `sweep run --json` prints. A cell that is to be compared writes its
  figures as JSON to `$HPCJOBS_RUN_DIR/summary.json`; its parameter `lr` is `--lr=VALUE` behind the program, and
  `$HPCJOBS_PARAM_LR`. `sweep results NAME --min loss` prints the best cell.
- `hold`, `release`, `requeue` and `update` are for jobs of Slurm. On this machine use `cancel` and `rerun`.
- `hpcjobs VERB --help` has every option. Ids of this machine begin with L, those of Slurm are numbers.

## JSON

Standard output of `--json` is one document; notes are on standard error. A command that fails before it has its
output prints `{{"error": {{"exit_code": 5, "message": "...", "hint": "...", "maybe_taken": false}}}}` instead. A verb
that checks (`where`, `sites check`, `container check`, `submit --test-only`) prints its output, and an exit code other
than 0 is the answer no. So look for the key `error`.
`hpcjobs skill --schema 'ps'` prints the JSON Schema of an output, `--schema error` that of an error.
`--json` is an option of:

{outputs}
## Verbs

| verb | does more than read | refused by HPCJOBS_READ_ONLY | what it does |
|---|---|---|---|
{verbs}
## Exit codes

`wait` and `submit --wait` end with the exit code of the job; it may be any number.
Standard output of `wait --json` then has the job's record, that of `submit --wait --json` the submitted job with its
`job_id`; neither is an `error`.

| code | meaning |
|---|---|
{codes}"""


def skill_text() -> str:
    """SKILL.md, from the verbs, the types of their JSON and the error classes."""
    from hpcjobs.cli.json_output import OUTPUTS

    rows = (
        f"| `{verb}` | {CHANGES.get(verb, '-')} | {'yes' if verb in REFUSED_READ_ONLY else '-'} | {text} |\n"
        for verb, (_, text) in VERBS.items()
    )
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

    from hpcjobs.cli.json_output import ERROR, OUTPUTS
    from hpcjobs.cli.json_output import schema as schema_of

    if schema not in (known := (*OUTPUTS, ERROR)):
        raise CommandLineError(f"no JSON of {schema!r}; {nearest(schema, known)}")
    print(json.dumps(schema_of(schema), indent=2))
