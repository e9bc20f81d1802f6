"""``hpcjobs sites``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcjobs.cli.output import Json, print_json, print_table

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


@app.callback()
def sites(context: typer.Context, as_json: Json = False) -> None:
    """List the sites known here and where each was found; `sites show NAME` prints one."""
    if context.invoked_subcommand is not None:
        return
    from hpcjobs.errors import ConfigError
    from hpcjobs.site.library import list_sites, load_site

    rows = []
    for entry in list_sites():
        try:
            told = load_site(str(entry.path)).description
        except ConfigError as error:
            told = f"broken: {error.message}"
        rows.append({"name": entry.name, "path": str(entry.path), "shadowed": entry.shadowed, "description": told})
    if as_json:
        print_json(rows)
        return
    shadow = {True: " (shadowed by the one above)", False: ""}
    print_table(
        ["SITE", "", "FILE"],
        [(str(r["name"]), str(r["description"]), f"{r['path']}{shadow[bool(r['shadowed'])]}") for r in rows],
    )


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Site name or file.")],
    as_json: Json = False,
) -> None:
    """Print a site as it is used here: every key, defaults included."""
    import msgspec

    from hpcjobs.site.library import load_site

    site = load_site(name)
    if as_json:
        print_json(site)
        return
    import yaml

    print(f"# {site.path}" + (" (rehearsal on the sandbox)" if site.rehearsal else ""))
    yaml.safe_dump(msgspec.to_builtins(site), sys.stdout, sort_keys=False, allow_unicode=True)
