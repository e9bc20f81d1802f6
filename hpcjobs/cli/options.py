"""Options that several commands have, groups of commands, and checks of the command line."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from hpcjobs.cli.completion import OF_FIELDS
from hpcjobs.site.sbatch import OPTIONS, RESOURCES, Argument, Sbatch, Treatment

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


COUNT, TEXT, SWITCH = int, str, bool


class SbatchOption(NamedTuple):
    """One option of sbatch that sets a field of `Resources`, and its line of help, empty for those rarely typed."""

    option: Sbatch
    help: str = ""

    @property
    def field(self) -> str:
        return self.option.field

    @property
    def kind(self) -> type:
        if self.option.argument is Argument.COUNT or self.field == "nice":
            return COUNT
        switch = self.option.argument in (Argument.NONE, Argument.OPTIONAL) and self.flag not in VALUE_OF_BARE
        return SWITCH if switch else TEXT

    @property
    def flag(self) -> str:
        return "--" + self.option.name

    @property
    def short(self) -> str | None:
        letter = self.option.short
        return None if letter is None or letter in _TAKEN_LETTERS else "-" + letter

    @property
    def flags(self) -> tuple[str, ...]:
        if self.field == "requeue":
            return (f"{self.flag}/--no-requeue",)
        return (self.flag,) if self.short is None else (self.flag, self.short)

    @property
    def annotation(self) -> Any:
        # A switch without its opposite: `--no-...` is not sbatch's, but for --no-requeue.
        option = typer.Option(
            *self.flags,
            help=self.help,
            show_default=False,
            hidden=not self.help,
            metavar=_METAVARS.get(self.field),
            autocompletion=OF_FIELDS.get(self.field),
        )
        return Annotated[self.kind | None, option]


_METAVARS = {"exclusive": "[=user|mcs|topo]"}
_TAKEN_LETTERS = ("s", "o")
"""``-s`` names the site, ``-o`` any option of sbatch."""
_HELP = {
    "partition": "Partition, or several: a,b.",
    "nodes": "Number of nodes: 4, or 2-4.",
    "ntasks": "Total number of tasks (ranks), divided evenly among the nodes.",
    "ntasks-per-node": "Tasks (ranks) per node.",
    "cpus-per-task": "CPUs per task.",
    "gpus": "Total number of GPUs, divided evenly among the nodes: 8, or v100:8.",
    "gpus-per-node": "GPUs per node: 4, or v100:4.",
    "mem": "Memory per node: 64G; a number without a unit is megabytes.",
    "time": "Time limit: 2h, 90m, 1-12:00:00, UNLIMITED; 90 is minutes.",
    "account": "Account to charge for the job.",
    "qos": "Quality of service.",
    "constraint": "Features that the nodes must have: ib&a100.",
    "nodelist": "Nodes that the job must have: n[01-04], or ./FILE.",
    "exclude": "Nodes that the job must not have.",
    "exclusive": "Share the nodes with no other job.",
    "array": "Job array: 0-9, or 0-9%2 for two tasks at once.",
    "dependency": "Start after other jobs: afterok:4711, singleton.",
    "mail-type": "When to send mail: END,FAIL.",
    "mail-user": "Who gets the mail.",
}
OFTEN_TYPED = tuple(SbatchOption(OPTIONS[name], help) for name, help in _HELP.items())
BY_NAME = tuple(SbatchOption(option) for option in RESOURCES if option.name not in _HELP)
"""Options without a line of their own in help."""
RARE = tuple(
    SbatchOption(option)
    for option in OPTIONS.values()
    if option.treatment in (Treatment.PASSED, Treatment.REFUSED) and option.name not in ("help", "version")
)
"""Options that are passed through unread, and those that are refused with the reason."""
SBATCH_OPTIONS = (*OFTEN_TYPED, *BY_NAME)
_NAMES = ", ".join(option.flag for option in BY_NAME)
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


SECTIONS = {
    "Used most": "partition nodes ntasks-per-node cpus-per-task gpus-per-node mem time account site job-name",
    "What runs": "launcher container stage-image env chdir snapshot template wrap srun spec no-check",
    "Resources": "ntasks gpus constraint nodelist exclude exclusive",
    "When and where": "qos array dependency after after-any after-fail test-only sbatch o",
    "Fault tolerance": "retries signal-before preflight spare min-nodes",
    "Output": "monitor notify notify-on mail-type mail-user dry-run explain parsable wait follow json help",
}
"""The options of a job, in the order of the help; a verb's own options come first."""


class ProgramCommand(SbatchCommand):
    """A command with a PROGRAM: what follows it are the program's own words, of a bundled trainer its flags."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        lines = [(max(param.opts, key=len).lstrip("-"), param) for param in self.get_params(ctx)]
        records = {name: (param, record) for name, param in lines if (record := param.get_help_record(ctx))}
        listed = {name for names in SECTIONS.values() for name in names.split()}
        own = [name for name in records if name not in listed]
        arguments = [name for name in own if records[name][0].param_type_name == "argument"]
        sections = {"Arguments": arguments, "Options": [name for name in own if name not in arguments]}
        for title, names in (sections | {title: names.split() for title, names in SECTIONS.items()}).items():
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
            if resources.get("exclusive") == VALUE_OF_BARE["--exclusive"]:
                resources["exclusive"] = True
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
