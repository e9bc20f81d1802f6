"""Verbs that have verbs of their own: `hpcjobs report jobs`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

_ANY_LENGTH = 10_000


class VerbGroup(TyperGroup):
    """A group whose help shows each verb's first sentence in full, and whose errors name the verb that was meant."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, verb.get_short_help_str(_ANY_LENGTH)) for name, verb in commands if verb and not verb.hidden]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            from hpcjobs.errors import nearest

            known = [name for name, verb in self.commands.items() if not verb.hidden]
            ctx.fail(f"no command {args[0]!r} of {ctx.info_name}; {nearest(args[0], known)}")
        return super().resolve_command(ctx, args)
