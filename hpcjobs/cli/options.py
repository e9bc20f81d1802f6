"""Options of sbatch as options of every verb that submits jobs; `hpcjobs.site.sbatch` declares them.

A field of `Resources` is an option by its own long name. What is often typed has a line in help; the rest is named in
help's last paragraph, and explained by ``man sbatch``.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from hpcjobs.cli.completion import OF_FIELDS
from hpcjobs.cli.groups import VerbGroup
from hpcjobs.cli.option_values import VALUE_OF_BARE, fill_bare_options
from hpcjobs.site.sbatch import OPTIONS, RESOURCES, Argument, Sbatch, Treatment

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


class ProgramCommand(SbatchCommand):
    """A command with a PROGRAM: what follows it are the program's own words, of a bundled trainer its flags."""

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
