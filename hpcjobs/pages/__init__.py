"""Shared parts of reports: HTML pages that need no other file and no network; the style of figures (`figures`)."""

from __future__ import annotations

from pathlib import Path

import jinja2

from hpcjobs import __version__


def render(template: str, **content: object) -> str:
    """Render a template of this folder; the content is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    footer = f"hpcjobs {__version__}; all figures are from the run folders and the accounting named above."
    return environment.get_template(f"{template}.html.j2").render(footer=footer, **content)
