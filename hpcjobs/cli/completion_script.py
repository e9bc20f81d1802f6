"""``hpcjobs completion``."""

from __future__ import annotations

from typing import Annotated

import typer

from hpcjobs.cli.completion import SHELLS, complete_shells, script_for
from hpcjobs.cli.output import CommandLineError

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=complete_shells)],
) -> None:
    """Print the completion script of a shell: eval "$(hpcjobs completion bash)" in ~/.bashrc."""
    if shell not in SHELLS:
        raise CommandLineError(f"no completion for shell {shell!r}: use {', '.join(SHELLS)}")
    print(script_for(shell))
