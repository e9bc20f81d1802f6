"""Fills in option values that may be left out, and refuses an option in the place of another option's value.

Click takes the next word as an option's value, whatever it is: ``submit -A --dry-run PROGRAM`` would submit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

VALUE_OF_BARE = {"--exclusive": "true"}
"""Options whose value may be left out, as sbatch has them, and what they mean then; a value stands behind ``=``."""
_TAKE_OPTIONS = ("-o", "--sbatch", "--srun")
"""Options whose values may be options of other programs: ``--srun --hint=nomultithread``."""


class _TypedOption(NamedTuple):
    """An option with a value: its place on the command line, and the name that takes the next word, if one does."""

    position: int
    takes_next: str | None


def fill_bare_options(context: Any, args: Sequence[str]) -> list[str]:
    """``args`` in which each option of `VALUE_OF_BARE` has its value; what follows a program is left alone."""
    arguments = list(args)
    for option in _options(context, args):
        if option.takes_next is None:
            name = arguments[option.position]
            arguments[option.position] = f"{name}={VALUE_OF_BARE[name]}"
    return arguments


def refuse_options_as_values(command: Any) -> None:
    """Have ``command``, and the commands of a group, refuse an option in the place of another option's value.

    ``--account=--dry-run`` is taken: nobody types that by accident.
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
    """End with a usage error where the value of an option is missing and the next option stands in its place."""
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
    """The options that have a value, up to the program or verb whose arguments follow."""
    names = {name for param in _params(context) if not param.is_flag and not param.count for name in param.opts}
    position = 0
    while position < len(args) and args[position] != "--":
        arg = args[position]
        if not arg.startswith("-") and not context.allow_interspersed_args:
            break
        if arg in VALUE_OF_BARE and arg in names:
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
