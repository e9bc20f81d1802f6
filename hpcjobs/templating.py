"""How templates of plain text are read: job scripts, Terraform files, start-up scripts."""

from __future__ import annotations

import shlex

import jinja2


def plain_text(loader: jinja2.BaseLoader, *, bytecode_cache: jinja2.BytecodeCache | None = None) -> jinja2.Environment:
    """Templates in which a name nobody gave is an error, nothing is escaped, and ``q`` quotes a word for the shell."""
    environment = jinja2.Environment(
        loader=loader,
        bytecode_cache=bytecode_cache,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    return environment
