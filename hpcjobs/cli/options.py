"""Options of several commands: options of sbatch, options from `JobSpec`, and ``-o``.

Types and help come from the table of sbatch's options and from the fields of `JobSpec`.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args

import typer
from typer.core import TyperCommand

from hpcjobs.cli.arguments import BARE, CommandLineError, VerbGroup, fill_bare_options
from hpcjobs.cli.completion import OF_FIELDS, complete_program
from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.layers import make_spec
from hpcjobs.job.models import Flag, JobSpec
from hpcjobs.site.resources import FIELDS, OPTIONS, Argument, Sbatch, Treatment, ValueKind

VALUE_OF_BARE = {f"--{option.name}": BARE for option in OPTIONS.values() if option.metavar}
"""Options with an optional value -> their value without one; a value follows after ``=``."""
COUNT, TEXT, SWITCH = int, str, bool


class SbatchOption(NamedTuple):
    """One option of sbatch as an option of the command line."""

    option: Sbatch
    may_be_auto: bool = False
    """``auto`` is a value too."""

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

    @cache  # noqa: B019 # one for each option of the table
    def annotation(self) -> Any:
        # Slurm has no `--no-...` form of a switch, except --no-requeue.
        option = typer.Option(
            *self.flags,
            help=self.option.help,
            show_default=False,
            hidden=not self.option.section,
            metavar="N|auto" if self.may_be_auto else self.option.metavar,
            parser=_count_or_auto if self.may_be_auto and self.kind is COUNT else None,
            autocompletion=OF_FIELDS.get(self.field),
        )
        return Annotated[self.kind | None, option]


AUTO = "auto"
_MAY_BE_AUTO = ("nodes", "ntasks_per_node", "cpus_per_task")
"""Fields of `Resources` that may be ``auto`` where a command has the parameter ``auto``; the launcher may be, too."""


def _count_or_auto(text: str) -> int | str:
    if text == AUTO:
        return text
    if not text.lstrip("-").isdecimal():
        raise typer.BadParameter(f"{text!r} is not a valid integer.")
    return int(text)


_TAKEN_LETTERS = ("s", "o")
"""``-s`` names the site, ``-o`` any option of sbatch."""
SBATCH_OPTIONS = tuple(SbatchOption(option) for option in OPTIONS.values() if option.treatment is Treatment.FIELD)
RARE = tuple(
    SbatchOption(option)
    for option in OPTIONS.values()
    if option.treatment in (Treatment.PASSED, Treatment.REFUSED) and option.name not in ("help", "version")
)
"""Options that are passed through unread, and options that are refused with the reason."""
_NAMES = ", ".join(option.flag for option in SBATCH_OPTIONS if not option.option.section)
# Behind \b help keeps the lines: it would break them within names, at a hyphen.
EPILOG = "\b\n" + textwrap.fill(f"These options of sbatch are also accepted: {_NAMES}.", 76, break_on_hyphens=False)


class OptionalValues:
    """Mixin of a command with sbatch's options: it accepts ``--exclusive`` and ``--exclusive=user``."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, fill_bare_options(ctx, args))  # type: ignore[misc]

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        if len(incomplete) > 2:  # its beginning: also of an option that the help leaves out
            for param in self.get_params(ctx):  # type: ignore[attr-defined]
                param.hidden = False
        return super().shell_complete(ctx, incomplete)  # type: ignore[misc]


class SbatchCommand(OptionalValues, TyperCommand):
    """A command with sbatch's options."""


class SbatchGroup(OptionalValues, VerbGroup):
    """A verb with sbatch's options and with further verbs."""


_SECTIONS = {
    "Used most": "site job-name",
    "What runs": "launcher container stage-image env chdir snapshot template wrap srun spec no-check",
    "Resources": "budget min-efficiency finish-by",
    "When and where": "after after-any after-fail test-only sbatch o",
    "Fault tolerance": "retries signal-before preflight spare min-nodes",
    "Output": "metric monitor notify notify-on dry-run explain parsable wait follow json help",
}
"""Options of a job that are not sbatch's, in the order of the help; a verb's own options come first."""
SECTIONS = {
    title: [*(option.name for option in FIELDS.values() if option.section == title), *names.split()]
    for title, names in _SECTIONS.items()
}


class ProgramCommand(SbatchCommand):
    """A command with a PROGRAM: arguments after it belong to the program; for a bundled trainer they are its flags."""

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
    """``name=value``, for ``--sbatch``. Raises RequestError: an option that hpcjobs refuses."""
    if option.option.treatment is Treatment.REFUSED:
        raise RequestError(
            f"{option.flag} is an option of sbatch that hpcjobs does not take", hint=option.option.reason
        )
    return option.option.name if value is True else f"{option.option.name}={value}"


@cache
def job_flags() -> dict[str, tuple[type, Flag]]:
    """Field of `JobSpec` -> its type, and its option; fields that no option sets are left out."""
    declared = {field: get_args(annotation) for field, annotation in JobSpec.__annotations__.items()}
    kinds = {bool | None: bool, int | None: int, str | None: str, dict[str, str]: list, tuple[str, ...]: list}
    return {
        field: (kinds[parts[0]], parts[1]) for field, parts in declared.items() if parts and isinstance(parts[-1], Flag)
    }


@cache
def _option(*names: str, kind: type, help: str) -> inspect.Parameter:
    """A parameter that Typer makes an option of; a switch has no opposite, a count is positive."""
    field = names[0].lstrip("-").replace("-", "_")
    least = 1 if kind is int else None
    option = typer.Option(*names, help=help, show_default=False, min=least, autocompletion=OF_FIELDS.get(field))
    annotation: Any = list[str] if kind is list else kind
    return _parameter(field, Annotated[annotation | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_job_options(
    *, only: Iterable[str] | None = None, without: Iterable[str] = (), help: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the program and the options of a job: its parameter ``request`` is the `JobSpec` that they make.

    Args:
        only: fields of `JobSpec` that the command has options for, and no program; default: all.
        without: fields of `JobSpec` or `Resources` without an option here, in addition to the command's parameters.
        help: another line of help for a field.

    A command with the parameter ``auto`` gets the fields with the value ``auto`` there; ``request`` lacks them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        flags: dict[str, inspect.Parameter] = {}
        for field, (kind, flag) in job_flags().items():
            if field not in {*without, *own} and (only is None or field in only):
                names = ("--" + field.replace("_", "-"), *flag.others)
                flags[field] = _option(*names, kind=kind, help=(help or {}).get(field, flag.help))
        chosen = [
            option._replace(may_be_auto="auto" in own and option.field in _MAY_BE_AUTO)
            for option in (*SBATCH_OPTIONS, *RARE)
            if option.field not in {*without, *own, *flags}
        ]
        arguments = typer.Argument(
            help="Trainer, module, .py file, executable, or script with #SBATCH lines.", autocompletion=complete_program
        )
        by_name = _option("-o", kind=list, help="An option of sbatch by its name: -o exclusive=user; -o qos= clears.")

        def run(**values: Any) -> None:
            resources: dict[str, Any] = {}
            passed: list[str] = []
            for option in chosen:
                value = values.pop(option.field)
                if value is not None and option.option.treatment is not Treatment.FIELD:
                    passed.append(_pass_through(option, value))
                elif value is not None:
                    resources[option.field] = True if value == VALUE_OF_BARE.get(option.flag) else value
            options = {field: values.pop(field) for field in flags}
            # A switch that was not given is not a no: a spec file may say yes.
            options = {field: value for field, value in options.items() if value not in (None, False)}
            if empty := [field for field, value in options.items() if value == ""]:
                flag = "--" + empty[0].replace("_", "-")
                raise RequestError(f"{flag}: its value is empty", hint="leave it out for the default")
            if "env" in options:
                options["env"] = environment(options["env"])
            if "auto" in own:
                sizes = {**resources, "launcher": options.get("launcher")}
                values["auto"] = tuple(field for field, value in sizes.items() if value == AUTO)
                resources = {field: value for field, value in resources.items() if value != AUTO}
                options = {field: value for field, value in options.items() if (field, value) != ("launcher", AUTO)}
            options["sbatch"] = [*options.get("sbatch", ()), *passed]
            options |= sbatch_options(values.pop("option") or [], resources)
            program = values.pop("program") or () if only is None else ()
            command(**values, request=make_spec(program, options))

        parameters = [_parameter("program", Annotated[list[str] | None, arguments])] if only is None else []
        for name, parameter in own.items():
            if name == "request":
                of_sbatch = (_parameter(option.field, option.annotation()) for option in chosen)
                parameters += [*flags.values(), *of_sbatch, by_name.replace(name="option")]
            elif name != "auto":
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads it
        return run

    return decorate


def sbatch_options(arguments: Sequence[str], flags: Mapping[str, object]) -> dict[str, object]:
    """``-o key=value``, ``-o key`` (a flag), ``-o key=`` (clears), keys with dashes or underscores.

    ``flags`` are options that were given by flags of their own (None: not given), and are part of the answer.

    Raises RequestError: no such option, or its flag was given too.
    """
    options = {name: value for name, value in flags.items() if value is not None}
    by_o: dict[str, object] = {}
    for text in arguments:
        key, equals, value = text.removeprefix("--").partition("=")
        name = key.replace("-", "_")
        if name not in FIELDS:
            raise RequestError(f"-o {text}: no sbatch option that -o can set", hint=_hint(key, equals))
        if name in options:
            raise RequestError(f"-o {text}: {name} has been given by its own flag too", hint="leave one of them out")
        by_o[name] = (value or None) if equals else True
    return options | by_o


def _hint(key: str, equals: str) -> str:
    """Return the option to type instead of ``-o key``."""
    name = key.replace("_", "-")
    if name in ("name", "job-name"):
        return "use --name"  # every verb has it by this name
    option = OPTIONS.get(name)
    if option is None and not equals:
        return (
            "-o NAME=VALUE sets an option of sbatch; sbatch's own -o FILE is not needed: hpcjobs logs shows the output"
        )
    if option is None:
        return nearest(key.replace("-", "_"), FIELDS)
    if option.treatment is Treatment.PASSED:
        return f"use --sbatch {name}{equals and '=VALUE'}"
    return option.reason if option.treatment is Treatment.REFUSED else f"use --{option.name}"


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """``--env NAME=VALUE``, or ``--env NAME`` to pass a variable on."""
    variables = {}
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals and key not in os.environ:
            raise CommandLineError(f"--env {key}: not set here; write {key}=VALUE")
        variables[key] = value if equals else os.environ[key]
    return variables
