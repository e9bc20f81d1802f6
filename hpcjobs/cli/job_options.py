"""Options of a job for every verb that submits jobs: those of `JobSpec`, sbatch's own, and ``-o``.

Help and types come from the fields of `JobSpec`; a field that is added there is an option of the verbs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, get_args, get_type_hints

import typer

from hpcjobs.cli.completion import OF_FIELDS, complete_program
from hpcjobs.cli.options import with_sbatch_options
from hpcjobs.cli.output import CommandLineError
from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.models import Flag, JobSpec
from hpcjobs.job.request import make_spec
from hpcjobs.site.resources import FIELDS, OPTIONS, Treatment


def job_flags() -> dict[str, tuple[type, Flag]]:
    """Field of `JobSpec` -> its type, and its option; fields that no option sets are left out."""
    hints = get_type_hints(JobSpec, include_extras=True)
    declared = {field: get_args(hints[field]) for field in JobSpec.__struct_fields__}
    kinds = {bool | None: bool, int | None: int, str | None: str, dict[str, str]: list, tuple[str, ...]: list}
    return {
        field: (kinds[parts[0]], parts[1]) for field, parts in declared.items() if parts and isinstance(parts[-1], Flag)
    }


def _option(*names: str, kind: type, help: str) -> inspect.Parameter:
    """A parameter that Typer makes an option of; a switch has no opposite, a count is positive."""
    field = names[0].lstrip("-").replace("-", "_")
    least = 1 if kind is int else None
    option = typer.Option(*names, help=help, show_default=False, min=least, autocompletion=OF_FIELDS.get(field))
    annotation: Any = list[str] if kind is list else kind
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field, only, default=None, annotation=Annotated[annotation | None, option])


def with_job_options(
    *, only: Iterable[str] | None = None, without: Iterable[str] = (), help: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the program and the options of a job: its parameter ``request`` is the `JobSpec` that they make.

    Args:
        only: fields of `JobSpec` that the command has options for, and no program; default: all.
        without: fields of `JobSpec` or `Resources` that it has no options for, beside its own parameters.
        help: another line of help for a field.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        left_out = {*without, *own}
        flags: dict[str, inspect.Parameter] = {}
        for field, (kind, flag) in job_flags().items():
            if field not in left_out and (only is None or field in only):
                names = ("--" + field.replace("_", "-"), *flag.others)
                flags[field] = _option(*names, kind=kind, help=(help or {}).get(field, flag.help))
        arguments = typer.Argument(
            help="Trainer, module, .py file, executable, or script with #SBATCH lines.", autocompletion=complete_program
        )
        takes_program = only is None
        by_name = _option("-o", kind=list, help="An option of sbatch by its name: -o exclusive=user; -o qos= clears.")

        def run(**values: Any) -> None:
            options = {field: values.pop(field) for field in flags}
            # A switch that was not given is not a no: a spec file may say yes.
            options = {field: value for field, value in options.items() if value not in (None, False)}
            if empty := [field for field, value in options.items() if value == ""]:
                flag = "--" + empty[0].replace("_", "-")
                raise RequestError(f"{flag}: its value is empty", hint="leave it out for the default")
            if "env" in options:
                options["env"] = environment(options["env"])
            resources = values.pop("resources")
            options["sbatch"] = [*options.get("sbatch", ()), *resources.pop("sbatch", ())]
            options |= sbatch_options(values.pop("option") or [], resources)
            program = values.pop("program") or () if takes_program else ()
            command(**values, request=make_spec(program, options))

        parameters: list[inspect.Parameter] = []
        if takes_program:
            annotation = Annotated[list[str] | None, arguments]
            parameters.append(
                inspect.Parameter("program", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        for name, parameter in own.items():
            if name != "request":
                parameters.append(parameter)
                continue
            resources = inspect.Parameter("resources", inspect.Parameter.KEYWORD_ONLY, annotation=dict[str, object])
            parameters += [*flags.values(), resources, by_name.replace(name="option")]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads it
        return with_sbatch_options(without=without)(run)

    return decorate


def sbatch_options(arguments: Sequence[str], flags: Mapping[str, object]) -> dict[str, object]:
    """``-o key=value``, ``-o key`` (a flag), ``-o key=`` (clears), keys with dashes or underscores.

    ``flags`` are options that were given by flags of their own (None: not given), and are part of the answer.

    Raises:
        RequestError: no such option, or it was given by its own flag too.
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
    """What to type in place of ``-o key``."""
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
