"""Hooks of mkdocs: pages that are made from code or stand at the root of the repository, and links out of docs/."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml
from mkdocs.structure.files import File, Files

from hpcjobs import errors
from hpcjobs.cli import GROUPS, app
from hpcjobs.job.project import schema_text as project_schema
from hpcjobs.site.schema import schema_text as site_schema

REPOSITORY = Path(__file__).parents[1]
_COMMAND_LINE = """\
# Command line

After reading this page you can look up every command and option. It is made from the commands themselves: each part is
what `hpcjobs COMMAND --help` prints.
"""
_GALLERY = """\
# Gallery of sites

After reading this page you can take a site file of a system like yours as a start: `hpcjobs sites show NAME` prints it.
The files of public systems were written from their documentation and were not tried on the systems themselves; each
names what is open.
"""
_LISTS = {
    "json.md",
    "python.md",
    "site_keys.md",
    "changelog.md",
    "command_line.md",
    "performance.md",
    "architecture.md",
}
_LINK = re.compile(r"(!?)\[([^]]+)\]\(([^)#]*)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the JSON Schemas."""
    pages = {
        "command_line.md": command_line(),
        "exit_codes.md": exit_codes(),
        "gallery.md": gallery(),
        "changelog.md": _from_root("CHANGELOG.md"),
        "contributing.md": _from_root("CONTRIBUTING.md"),
        "schemas/site.json": site_schema(),
        "schemas/project.json": project_schema(),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files of the repository that are no pages instead of linking to them; no comment of the tests is shown.

    In search, pages of many short entries come after those that explain.
    """
    page.meta["search"] = {"boost": 0.0005 if page.file.src_uri in _LISTS else 1}
    up = "../" * page.file.src_uri.count("/")

    def resolved(match: re.Match[str]) -> str:
        image, text, path, anchor = match.groups()
        if not path.startswith(f"../{up}"):
            return match[0]
        name = path.removeprefix(f"../{up}")
        own = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}.get(name)
        return f"{image}[{text}]({up}{own}{anchor or ''})" if own else f"{text} (`{name}`)"

    return re.sub(r"(?m)^<!-- (?:not )?run.*? -->\n", "", _LINK.sub(resolved, markdown))


def _from_root(name: str) -> str:
    """A file of the repository's root as a page: links into docs/ lose that folder."""
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](")


def command_line() -> str:
    """Every verb and its options, as ``--help`` prints them at 80 columns."""
    root: Any = typer.main.get_command(app)
    parts = [_COMMAND_LINE]
    with typer.Context(root, info_name="hpcjobs") as above:  # type: ignore[attr-defined]
        for title, verbs in GROUPS.items():
            parts.append(f"\n## {title}\n")
            for verb in verbs:
                parts.extend(_help(root.get_command(above, verb), verb, above, 3))
    return "".join(parts)


def _help(command: Any, name: str, above: Any, level: int) -> Iterator[str]:
    context = command.make_context(
        name, [], parent=above, resilient_parsing=True, max_content_width=80, terminal_width=80
    )
    yield f"\n{'#' * level} {context.command_path}\n\n```text\n{command.get_help(context).rstrip()}\n```\n"
    for other in getattr(command, "commands", {}).values():
        if not other.hidden:
            yield from _help(other, other.name, context, level + 1)


def exit_codes() -> str:
    """The table of exit codes, from the error classes."""
    table = "".join(f"| {code} | {text.replace('``', '`')} |\n" for code, text in errors.list_exit_codes().items())
    return (
        "# Exit codes\n\nAfter reading this page you can tell in a script why a command ended.\n\n"
        f"| code | meaning |\n|---|---|\n{table}\n"
        "`hpcjobs wait` and `hpcjobs submit --wait` end with the job's own exit code. "
        "Those of the trainers are in [Trainers](trainers.md#exit-codes).\n"
    )


def gallery() -> str:
    """The shipped site files with their descriptions, public systems with the pages that they were written from."""
    parts = [_GALLERY]
    folder = REPOSITORY / "site_configs"
    for title, paths in (("Kinds of system", folder.glob("*.yaml")), ("Public systems", folder.glob("gallery/*.yaml"))):
        parts.append(f"\n## {title}\n\n| site | system | written from |\n|---|---|---|\n")
        for path in sorted(paths):
            text = path.read_text(encoding="utf-8")
            sources = re.findall(r"(?m)^# Source: (.*), (https://\S+?)(?:,.*)?$", text)
            links = ", ".join(f"[{name.replace('|', '')}]({address})" for name, address in sources)
            parts.append(f"| `{path.stem}` | {yaml.safe_load(text).get('description', '')} | {links} |\n")
    return "".join(parts)
