"""Checks of the command line and the group of commands: needs no table of options, for a fast help page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

from hpcjobs.errors import nearest

_ANY_LENGTH = 10_000


class CommandLineError(typer.BadParameter):
    """A command line that is wrong in more than one option's value; exit code 2, as of an unknown option."""

    def format_message(self) -> str:
        return self.message


class VerbGroup(TyperGroup):
    """A group that shows each verb's first sentence in full, and names the likely verb for a mistyped one."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, verb.get_short_help_str(_ANY_LENGTH)) for name, verb in commands if verb and not verb.hidden]
            )

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            known = [name for name, verb in self.commands.items() if not verb.hidden]
            ctx.fail(f"no command {args[0]!r} of {ctx.info_name}; {nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


def verb_group(text: str) -> typer.Typer:
    return typer.Typer(cls=VerbGroup, rich_markup_mode=None, add_completion=False, no_args_is_help=True, help=text)


BARE = "true"
"""Value of an option that may have one behind ``=`` and was typed without."""
_TAKE_OPTIONS = ("-o", "--sbatch", "--srun")
"""Options that take options of other programs as values: ``--srun --hint=nomultithread``."""


class _TypedOption(NamedTuple):
    """An option with a value: its place on the command line, and the name that takes the next word, if one does."""

    position: int
    takes_next: str | None


def fill_bare_options(context: Any, args: Sequence[str]) -> list[str]:
    """Return ``args`` with a value for each option that has an optional one; the program's arguments stay unchanged."""
    arguments = list(args)
    for option in _options(context, args):
        if option.takes_next is None:
            name = arguments[option.position]
            arguments[option.position] = f"{name}={BARE}"
    return arguments


def refuse_options_as_values(command: Any) -> None:
    """Have ``command``, and the commands of a group, refuse an option in the place of another option's value.

    ``--account=--dry-run`` is accepted: it is deliberate.
    """
    for inner in getattr(command, "commands", {}).values():
        refuse_options_as_values(inner)
    parse = command.parse_args

    def parse_args(context: Any, args: list[str]) -> Any:
        if not context.resilient_parsing:
            check_values(context, args)
        return parse(context, args)

    command.parse_args = parse_args


def check_values(context: Any, args: Sequence[str]) -> None:
    """End with a usage error if the next option follows directly on an option that needs a value."""
    params = {name: param for param in _params(context) for name in (*param.opts, *param.secondary_opts)}
    for position, name in _options(context, args):
        if name is None or position + 1 == len(args):
            continue
        value = args[position + 1]
        if value == "--":  # `-A $ACCOUNT -- PROGRAM`, and the variable is empty
            context.fail(f"Option {name!r} requires an argument; '--' begins the program.")
        option, equals, _ = value.partition("=")
        if option in params and not (equals and name in _TAKE_OPTIONS):
            longest = max(params[name].opts, key=len)
            spelling = f"{longest}={value}" if longest.startswith("--") else longest + value
            context.fail(
                f"Option {name!r} requires an argument; {option!r} is an option of {context.command_path}. "
                f"To pass it as the argument, write {spelling}"
            )


def _params(context: Any) -> list[Any]:
    return [param for param in context.command.get_params(context) if param.param_type_name == "option"]


def _options(context: Any, args: Sequence[str]) -> Iterator[_TypedOption]:
    """Yield the options with values that come before the program or the next verb."""
    names = {name for param in _params(context) if not param.is_flag and not param.count for name in param.opts}
    bare = {name for param in _params(context) if (param.metavar or "").startswith("[=") for name in param.opts}
    position = 0
    while position < len(args) and args[position] != "--":
        arg = args[position]
        if not arg.startswith("-") and not context.allow_interspersed_args:
            break
        if arg in bare:
            yield _TypedOption(position, None)
        elif (name := _name_before_value(arg, names)) is not None:
            yield _TypedOption(position, name)
            position += 1  # the next word is its value
        position += 1


def _name_before_value(arg: str, names: set[str]) -> str | None:
    """The option that takes the word after ``arg``: ``--nodes``, ``-N``, or the last letter of ``-fN``."""
    if arg in names:
        return arg
    letters = [f"-{letter}" for letter in arg[1:]] if arg[:1] == "-" != arg[1:2] else []
    return letters[-1] if letters and letters[-1] in names and not names.intersection(letters[:-1]) else None
