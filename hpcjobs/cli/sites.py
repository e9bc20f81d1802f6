"""``hpcjobs sites``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpcjobs.cli import sites_init
from hpcjobs.cli.output import Json, print_json, print_table

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)
app.command("init")(sites_init.init)


@app.callback()
def sites(context: typer.Context, as_json: Json = False) -> None:
    """List the sites known here with their files; `sites show NAME` prints one, `sites init` writes one."""
    if context.invoked_subcommand is not None:
        return
    from hpcjobs.errors import ConfigError
    from hpcjobs.site.library import list_sites, load_site

    rows = []
    for entry in list_sites():
        try:
            description = load_site(str(entry.path)).description
        except ConfigError as error:
            description = f"broken: {error.message}"
        rows.append(
            {
                "name": entry.name,
                "path": str(entry.path),
                "shadowed": entry.shadowed,
                "layer": entry.layer,
                "description": description,
            }
        )
    if as_json:
        print_json(rows)
        return
    shadow = {True: " (shadowed by the one above)", False: ""}
    print_table(
        ["SITE", "", "LAYER", "FILE"],
        [
            (str(r["name"]), str(r["description"]), str(r["layer"]), f"{r['path']}{shadow[bool(r['shadowed'])]}")
            for r in rows
        ],
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


@app.command()
def schema() -> None:
    """Print the JSON Schema of a site file, by which editors complete and check it."""
    from hpcjobs.site.schema import schema_text

    sys.stdout.write(schema_text())
