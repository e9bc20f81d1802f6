"""``hpcjobs help``: the options of a command, or a page of the documentation, also without a network."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpcjobs.cli import VERBS
from hpcjobs.cli.arguments import CommandLineError
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

    Raises:
        CommandLineError: neither a command nor a topic has this name.
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
        text = _list_exit_codes()
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


def _list_exit_codes() -> str:
    rows = (f"| {code} | {meaning} |" for code, meaning in list_exit_codes().items())
    return "\n".join(["# Exit codes", "", "| code | meaning |", "|---|---|", *rows, ""])
