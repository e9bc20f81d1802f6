"""Sets up templates of plain text: job scripts, Terraform files, start-up scripts."""

from __future__ import annotations

import shlex

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


def plain_text(loader: jinja2.BaseLoader, *, bytecode_cache: jinja2.BytecodeCache | None = None) -> jinja2.Environment:
    """Templates without escapes: an undefined name is an error, and ``q`` quotes a word for the shell.

    They run in jinja2's sandbox: a template may come from the current folder, which may be anybody's.
    """
    environment = ImmutableSandboxedEnvironment(
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
