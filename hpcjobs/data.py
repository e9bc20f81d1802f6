"""Finds the files shipped with hpcjobs (``_data`` of a wheel, or the root of a checkout), and renders templates."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import jinja2

_PACKAGE = Path(__file__).resolve().parent

Kind = Literal["templates", "site_configs", "containers", "docs"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def data_folder(kind: Kind) -> Path:
    """The folder of shipped ``kind``; a wheel carries it in ``hpcjobs/_data``."""
    packed = _PACKAGE / "_data" / kind
    return packed if packed.is_dir() else _PACKAGE.parent / kind


def plain_text(loader: jinja2.BaseLoader, *, bytecode_cache: jinja2.BytecodeCache | None = None) -> jinja2.Environment:
    """Templates without escapes: an undefined name is an error, and ``q`` quotes a word for the shell.

    They run in jinja2's sandbox: a template may come from the current folder, which may be anybody's.
    """
    import jinja2.sandbox  # most commands find files and render none

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
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
