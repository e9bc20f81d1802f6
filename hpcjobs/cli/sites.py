"""``hpcjobs sites``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpcjobs.cli import sites_check, sites_init, sites_trust
from hpcjobs.cli.completion import complete_sites
from hpcjobs.cli.groups import VerbGroup
from hpcjobs.cli.output import Json, print_output, print_table
from hpcjobs.cli.terminal import write_document

if TYPE_CHECKING:
    from hpcjobs.site.search import SiteEntry

app = typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False, invoke_without_command=True)
app.command("init")(sites_init.init)
app.command("check")(sites_check.check)
app.command("trust")(sites_trust.trust)


@app.callback()
def sites(context: typer.Context, as_json: Json = False) -> None:
    """List the site files of every layer; `sites show NAME` prints one, `sites init` writes one."""
    if context.invoked_subcommand is not None:
        return
    from hpcjobs.site.search import SHIPPED, list_sites

    entries = list_sites()
    rows = [_row(entry, entries) for entry in entries]
    if as_json:
        print_output("sites", rows)
        return
    tables = {
        "SITE": [row for row in rows if row["layer"] not in SHIPPED],
        "EXAMPLE": [row for row in rows if row["layer"] == "example"],
        "GALLERY": [row for row in rows if row["layer"] == "gallery"],
    }
    for number, (title, rows_of_table) in enumerate((title, some) for title, some in tables.items() if some):
        print("\n" * bool(number), end="")
        _print_rows(rows_of_table, title)


def _row(entry: SiteEntry, entries: list[SiteEntry]) -> dict[str, object]:
    from hpcjobs.errors import ConfigError
    from hpcjobs.site.library import read_site

    extended: tuple[str, ...] = ()
    untrusted: tuple[str, ...] = ()
    try:
        site = read_site(entry.path)
        description, extended, untrusted = site.description, site.extended, site.untrusted
    except ConfigError as error:
        description = f"broken: {error.message}"
    winner = next(other for other in entries if other.name == entry.name)
    return {
        "name": entry.name,
        "path": str(entry.path),
        "shadowed": entry.shadowed,
        "shadowed_by": str(winner.path) if entry.shadowed else None,
        "layer": entry.layer,
        "extends": extended,
        "untrusted": untrusted,
        "description": description,
    }


def _print_rows(rows: list[dict[str, object]], title: str) -> None:
    def file(row: dict[str, object]) -> str:
        shadow = f" (shadowed by {row['shadowed_by']})" if row["shadowed"] else ""
        return str(row["path"]) + (" (not trusted)" if row["untrusted"] else "") + shadow

    print_table(
        [title, "DESCRIPTION", "LAYER", "FILE"],
        [(str(row["name"]), str(row["description"]).strip(), str(row["layer"]), file(row)) for row in rows],
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Site name or file.", autocompletion=complete_sites)],
    as_json: Json = False,
) -> None:
    """Print a site as hpcjobs uses it: every key, defaults included, with the file and line of each key that is set."""
    from hpcjobs.cli.site_text import write_site
    from hpcjobs.site.library import load_site

    site = load_site(name, allow_untrusted=True)
    if as_json:
        print_output("sites show", site)
        return
    write_document("".join(f"{line}\n" for line in write_site(site)))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a site file; editors use it to complete and check keys."""
    from hpcjobs.site.schema import schema_text

    sys.stdout.write(schema_text())
