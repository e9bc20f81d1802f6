"""Makes command-line flags from frozen dataclasses: each field is a flag, declared in the module that uses it."""

from __future__ import annotations

import argparse
import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from hpcjobs.runtime.exits import UsageError

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def flag(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] = str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also `--its-name`. A tuple as default takes one or more values."""
    settings = {"help": help, "parse": parse, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=settings)


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    return _at_least(kind, "more than 0", lambda value: value > 0)


def not_negative(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    return _at_least(kind, "0 or more", lambda value: value >= 0)


def _at_least(
    kind: Callable[[str], Number], requirement: str, holds: Callable[[Number], bool]
) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {requirement}")
        return value

    return parse


class StepRange(NamedTuple):
    """The steps after step `start`, up to step `stop`."""

    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"


def parse_step_range(text: str) -> StepRange:
    start, colon, stop = text.partition(":")
    if not (colon and start.isascii() and start.isdigit() and stop.isascii() and stop.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not START:STOP, such as 10:13")
    steps = StepRange(int(start), int(stop))
    if steps.start >= steps.stop:
        raise argparse.ArgumentTypeError(f"{text}: STOP is not after START")
    return steps


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one rank alone prints the error."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", hint=f"{self.prog} --help")


def list_options(item: Field[Any]) -> list[str]:
    """List the flags of a field with their dashes."""
    name = item.name.replace("_", "-")
    return [f"--{name}", f"--no-{name}"] if isinstance(item.default, bool) else [f"--{name}"]


def add_flags(parser: argparse.ArgumentParser, owner: type[Any], *, title: str) -> None:
    """Add one flag per field of `owner`."""
    group = parser.add_argument_group(title)
    for item in fields(owner):
        name, meta = "--" + item.name.replace("_", "-"), item.metadata
        shown = "" if item.default in (None, (), "", MISSING) else f" [{item.default}]"
        common: dict[str, Any] = {"dest": item.name, "default": item.default, "help": _escape(meta["help"] + shown)}
        if isinstance(item.default, bool):
            group.add_argument(name, action=argparse.BooleanOptionalAction, **common)
            continue
        many: dict[str, Any] = {"nargs": "+"} if isinstance(item.default, tuple) else {}
        if item.default is MISSING:
            common = {"dest": item.name, "required": True, "help": _escape(meta["help"])}
        group.add_argument(name, type=meta["parse"], choices=meta["choices"], metavar=meta["metavar"], **common, **many)


def _escape(text: str) -> str:
    """Double percent signs, which argparse would read as the start of a format."""
    return text.replace("%", "%%")


def flags_of(function: Callable[..., object]) -> type[Any]:
    """A dataclass of flags from the keyword-only parameters of a function: their names, types, defaults and help.

    `width: int = 32` is `--width`; `width: Annotated[int, "hidden units"] = 32` has a help text too. Types are str,
    int, float, bool, Literal of strings, and each of these `| None`.

    Raises:
        UsageError: a parameter has no type, or one that no flag can have.
    """
    own = [one for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    hints = get_type_hints(function, include_extras=True) if own else {}
    items: list[tuple[str, Any, Any]] = []
    for parameter in own:
        hint, help_text = hints.get(parameter.name), ""
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
            help_text = " ".join(note for note in notes if isinstance(note, str))
        alternatives = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
        kind = alternatives[0] if len(alternatives) == 1 else None
        choices = get_args(kind) if get_origin(kind) is Literal else None
        if choices is None and (kind is None or kind not in (str, int, float, bool)):
            raise UsageError(
                f"the parameter {parameter.name} of {function.__name__} has the type {hint}, which no flag can have",
                hint="str, int, float, bool, Literal of strings, or one of these | None",
            )
        default = MISSING if parameter.default is parameter.empty else parameter.default
        parse = str if kind is None or choices is not None else parse_as(kind)
        settings = {"help": help_text, "parse": parse, "choices": choices, "metavar": None}
        items.append((parameter.name, Any, field(default=default, metadata=settings)))
    return make_dataclass("WorkloadFlags", items, frozen=True, kw_only=True)


def parse_as(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for one type with a readable error."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not of type {getattr(kind, '__name__', kind)}") from None

    return parse


def read_flags(owner: type[T], parsed: argparse.Namespace) -> T:
    """Return `owner` with the values of a parsed command line."""
    values = {item.name: getattr(parsed, item.name) for item in fields(owner)}  # type: ignore[arg-type]
    return owner(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


class UnknownFlagError(UsageError):
    """An argument that is not a known flag."""

    def __init__(self, trainer: str, argument: str, *, hint: str) -> None:
        super().__init__(f"{trainer}: unknown argument {argument!r}", hint=hint)
        self.argument = argument


def parse_all(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; the error for an unknown flag names the nearest known one.

    Raises:
        UnknownFlagError: a flag is unknown. UsageError: a flag has an invalid value.
    """
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{parser.prog} --help lists the flags"
        raise UnknownFlagError(parser.prog, unknown[0], hint=hint)
    return parsed
