"""Options that several commands have, groups of commands, and checks of the command line."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from hpcjobs.cli.arguments import BARE, VerbGroup, fill_bare_options
from hpcjobs.cli.completion import OF_FIELDS
from hpcjobs.site.resources import FIELDS, OPTIONS, Argument, Sbatch, Treatment, ValueKind

VALUE_OF_BARE = {f"--{option.name}": BARE for option in OPTIONS.values() if option.metavar}
"""Options whose value may be left out, with their value in this case; a value follows after ``=``."""
COUNT, TEXT, SWITCH = int, str, bool


class SbatchOption(NamedTuple):
    """One option of sbatch as an option of the command line."""

    option: Sbatch

    @property
    def field(self) -> str:
        return self.option.field

    @property
    def kind(self) -> type:
        if self.option.kind in (ValueKind.COUNT, ValueKind.NUMBER):
            return COUNT
        switch = self.option.argument in (Argument.NONE, Argument.OPTIONAL) and not self.option.metavar
        return SWITCH if switch else TEXT

    @property
    def flag(self) -> str:
        return "--" + self.option.name

    @property
    def flags(self) -> tuple[str, ...]:
        opposite = f"--no-{self.option.name}"
        if opposite[2:] in OPTIONS:
            return (f"{self.flag}/{opposite}",)
        letter = self.option.short
        return (self.flag,) if letter is None or letter in _TAKEN_LETTERS else (self.flag, f"-{letter}")

    @property
    def annotation(self) -> Any:
        # A switch without its opposite: `--no-...` is not sbatch's, but for --no-requeue.
        option = typer.Option(
            *self.flags,
            help=self.option.help,
            show_default=False,
            hidden=not self.option.section,
            metavar=self.option.metavar,
            autocompletion=OF_FIELDS.get(self.field),
        )
        return Annotated[self.kind | None, option]


_TAKEN_LETTERS = ("s", "o")
"""``-s`` names the site, ``-o`` any option of sbatch."""
SBATCH_OPTIONS = tuple(SbatchOption(option) for option in OPTIONS.values() if option.treatment is Treatment.FIELD)
RARE = tuple(
    SbatchOption(option)
    for option in OPTIONS.values()
    if option.treatment in (Treatment.PASSED, Treatment.REFUSED) and option.name not in ("help", "version")
)
"""Options that are passed through unread, and those that are refused with the reason."""
_NAMES = ", ".join(option.flag for option in SBATCH_OPTIONS if not option.option.section)
# Behind \b help keeps the lines as they are: it would break them within names, at a hyphen.
EPILOG = "\b\n" + textwrap.fill(f"These options of sbatch are also accepted: {_NAMES}.", 76, break_on_hyphens=False)


class OptionalValues:
    """Of a command with sbatch's options: ``--exclusive`` and ``--exclusive=user`` are both understood."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, fill_bare_options(ctx, args))  # type: ignore[misc]


class SbatchCommand(OptionalValues, TyperCommand):
    """A command with sbatch's options."""


class SbatchGroup(OptionalValues, VerbGroup):
    """A verb with sbatch's options and verbs of its own."""


_SECTIONS = {
    "Used most": "site job-name",
    "What runs": "launcher container stage-image env chdir snapshot template wrap srun spec no-check",
    "Resources": "",
    "When and where": "after after-any after-fail test-only sbatch o",
    "Fault tolerance": "retries signal-before preflight spare min-nodes",
    "Output": "monitor notify notify-on dry-run explain parsable wait follow json help",
}
"""Options of a job that are not sbatch's, in the order of the help; a verb's own options come first."""
SECTIONS = {
    title: [*(option.name for option in FIELDS.values() if option.section == title), *names.split()]
    for title, names in _SECTIONS.items()
}


class ProgramCommand(SbatchCommand):
    """A command with a PROGRAM: what follows it are the program's own words, of a bundled trainer its flags."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        lines = [(max(param.opts, key=len).lstrip("-"), param) for param in self.get_params(ctx)]
        records = {name: (param, record) for name, param in lines if (record := param.get_help_record(ctx))}
        listed = {name for names in SECTIONS.values() for name in names}
        own = [name for name in records if name not in listed]
        arguments = [name for name in own if records[name][0].param_type_name == "argument"]
        sections = {"Arguments": arguments, "Options": [name for name in own if name not in arguments]}
        for title, names in (sections | SECTIONS).items():
            if rows := [records[name][1] for name in names if name in records]:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        if not ctx.params.get("program"):
            return super().shell_complete(ctx, incomplete)
        program = next(param for param in self.params if param.name == "program")
        return program.shell_complete(ctx, incomplete)


def _pass_through(option: SbatchOption, value: object) -> str:
    """``name=value``, for ``--sbatch``.

    Raises:
        RequestError: an option that hpcjobs refuses.
    """
    if option.option.treatment is Treatment.REFUSED:
        from hpcjobs.errors import RequestError

        raise RequestError(
            f"{option.flag} is an option of sbatch that hpcjobs does not take", hint=option.option.reason
        )
    return option.option.name if value is True else f"{option.option.name}={value}"


def with_sbatch_options(*, without: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of sbatch: its parameter ``resources`` gets those that were typed, by field.

    A field that the command has a parameter of its own for is that command's own, and so are those of ``without``. What
    is passed through unread is in ``resources["sbatch"]``.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        left_out = {*without, *own.parameters}
        chosen = [option for option in SBATCH_OPTIONS if option.field not in left_out]

        passed = [option for option in RARE if option.field not in left_out]

        def run(**values: Any) -> None:
            typed = {option.field: values.pop(option.field) for option in chosen}
            resources = {field: value for field, value in typed.items() if value is not None}
            resources |= {
                option.field: True
                for option in chosen
                if option.option.metavar and resources.get(option.field) == VALUE_OF_BARE[option.flag]
            }
            rare = {option: value for option in passed if (value := values.pop(option.field)) is not None}
            if rare:
                resources["sbatch"] = [_pass_through(option, value) for option, value in rare.items()]
            command(**values, resources=resources)

        parameters: list[inspect.Parameter] = []
        for name, parameter in own.parameters.items():
            if name != "resources":
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            for option in (*chosen, *passed):
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(option.field, kind, default=None, annotation=option.annotation))
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads it
        return run

    return decorate
