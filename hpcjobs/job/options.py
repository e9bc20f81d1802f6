"""Options of sbatch: read from the lines of a batch script, and written for a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.files import path_word
from hpcjobs.job.models import Job
from hpcjobs.site.resources import (
    BY_LETTER,
    Argument,
    Sbatch,
    Treatment,
    ValueKind,
    find_option,
    gpus_in_gres,
    is_option_where,
)
from hpcjobs.units import memory_bytes

MARKS = ("#SBATCH", "#SLURM")
"""Beginnings of the lines with options, up to the first command."""
MARKS_OF_OTHERS = ("#PBS", "#BSUB")
"""Beginnings of lines of other schedulers, which sbatch translates wherever in a script they stand."""
_SPACE = " \t\v\f\r"
_HEADER_BYTES = 1 << 20


class Directive(NamedTuple):
    """One option of a ``#SBATCH`` line."""

    option: Sbatch
    value: str | None
    line: int


class BatchScript(NamedTuple):
    """A script and its options, in their order."""

    path: Path
    directives: tuple[Directive, ...]


def is_batch_script(path: Path) -> bool:
    """Whether the file has lines of options where sbatch looks for them, be it with or without a ``#!`` line."""
    # os.path: no error for a word that is too long for a file name
    return os.path.isfile(path) and any(True for _ in _marked_lines(_read_header(path), MARKS + MARKS_OF_OTHERS))


def read_batch_script(path: Path) -> BatchScript:
    """The options of the script at ``path``.

    Raises RequestError: not a script for sbatch, an unknown option of sbatch, an option without its value, or an option
    of another scheduler that is not to be ignored.
    """
    text = _read_header(path)
    if "\r\n" in text:
        raise RequestError(
            f"{path} has the line ends of DOS, which sbatch refuses", hint=f"sed -i 's/\\r$//' {path_word(path)}"
        )
    if "\0" in text:
        raise RequestError(f"{path} has a NUL character, which sbatch refuses")
    if not text.startswith("#!"):
        raise RequestError(
            f"{path}: a batch script begins with the line of its interpreter, such as #!/bin/bash",
            hint="--launcher srun starts the file as a task on each node, without the options of its lines",
        )
    directives: list[Directive] = []
    for number, line in _marked_lines(text, MARKS):
        directives += parse_line(line, f"{path.name}:{number}", number=number)
    if not any(directive.option.name == "ignore-pbs" for directive in directives):
        _refuse_lines_of_others(text, path)
    return BatchScript(path, tuple(directives))


def _refuse_lines_of_others(text: str, path: Path) -> None:
    if "SBATCH_IGNORE_PBS" in os.environ:
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith(MARKS_OF_OTHERS):
            raise RequestError(
                f"{path.name}:{number}: {line.strip()!r}: sbatch would translate this line; hpcjobs cannot",
                hint="write the option as an #SBATCH line; the line #SBATCH --ignore-pbs leaves such lines out",
            )


def parse_line(text: str, where: str, *, number: int = 0) -> Iterator[Directive]:
    """The options that ``text``, the rest of a line with options, names.

    Raises RequestError: as `read_batch_script`.
    """
    return _parse(_split(text, where), number, where)


def _read_header(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_HEADER_BYTES).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise RequestError(f"batch script {path} cannot be read: {error.strerror}") from error


def _marked_lines(text: str, marks: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Number and rest of each line that begins with a mark, up to the first that is neither empty nor a comment."""
    for number, line in enumerate(text.split("\n"), 1):
        if (mark := next(filter(line.startswith, marks), None)) is not None:
            yield number, line[len(mark) :]
        elif (bare := line.strip(_SPACE)) and not bare.startswith("#"):
            return


def _split(line: str, where: str) -> list[str]:
    """Split a line into words: quotes group, a backslash escapes the next character, ``#`` begins a comment."""
    arguments: list[str] = []
    current: list[str] | None = None
    quote = ""
    chars = iter(line)
    for char in chars:
        if char == "\\":
            current = [*(current or []), next(chars, "")]
        elif quote:
            if char == quote:
                quote = ""
            else:
                current = [*(current or []), char]
        elif char in "\"'":
            quote, current = char, current or []
        elif char == "#":
            break
        elif char in _SPACE:
            arguments += ["".join(current)] if current is not None else []
            current = None
        else:
            current = [*(current or []), char]
    if quote:
        raise RequestError(f"{where}:{line}: the quotation {quote} is not closed")
    return [*arguments, *(["".join(current)] if current is not None else [])]


def _parse(arguments: list[str], number: int, where: str) -> Iterator[Directive]:
    """Options as getopt_long reads them: ``-N2``, ``-N 2``, ``--nodes=2``, ``--nodes 2``, abbreviations."""
    rest = iter(arguments)
    for arg in rest:
        if arg in ("hetjob", "packjob"):
            raise RequestError(f"{where}: {arg}: jobs of several components are not supported", hint="use sbatch")
        if arg.startswith("--") and len(arg) > 2:
            name, equals, value = arg[2:].partition("=")
            # Plugins of a site add options that the table lacks; Slurm knows whether there is one.
            option = find_option(name) or Sbatch(name, None, Argument.OPTIONAL, Treatment.PASSED)
            given = value if equals else None
            if option.argument is Argument.NONE and equals:
                raise RequestError(f"{where}: {arg}: --{option.name} has no value")
            if option.argument in (Argument.TEXT, Argument.COUNT) and not equals:
                given = _value_of(arg, next(rest, None), where)
            yield Directive(option, given, number)
        elif arg.startswith("-") and len(arg) > 1:
            yield from _parse_letters(arg, rest, number, where)
        else:
            raise RequestError(f"{where}: {arg!r} is no option", hint="a value with blanks needs quotes")


def _parse_letters(letters_arg: str, rest: Iterator[str], number: int, where: str) -> Iterator[Directive]:
    letters = letters_arg[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        option = BY_LETTER.get(letter)
        if option is None:
            raise RequestError(f"{where}: -{letter}: sbatch has no such option")
        if option.argument in (Argument.NONE, Argument.OPTIONAL):
            yield Directive(option, None, number)
            continue
        yield Directive(option, letters or _value_of(f"-{letter}", next(rest, None), where), number)
        return


def _value_of(option: str, value: str | None, where: str) -> str:
    if value is None:
        raise RequestError(f"{where}: {option} needs a value")
    return value


Option = tuple[str, str | None]
"""A long option of sbatch without its dashes, and its value (None: a flag)."""


def sbatch_options(job: Job) -> list[Option]:
    """Every option ``job`` sends to sbatch except job name and output, in the order of `Resources`.

    The site's ``directives`` rename or remove options; passed-through options (``sbatch``) come last.

    Raises RequestError: GPUs are requested twice, or cannot be shared by the tasks.
    """
    options = [mapped for option in _plain_options(job) for mapped in _site_spelling(job, option)]
    return _with_one_gres(options + [_name_and_value(extra) for extra in job.sbatch])


def _plain_options(job: Job) -> Iterator[Option]:
    for field in job.resources.__struct_fields__:
        value = getattr(job.resources, field)
        if value is None or (value is False and field != "requeue"):
            continue
        if field == "nodes":
            yield "nodes", f"{job.nodes}-{job.max_nodes}" if job.max_nodes else str(job.nodes + job.spare)
        elif field == "gpus_per_node":
            yield from _gpu_options(job, job.gpus_per_node)
        elif field == "requeue":
            yield "requeue" if value else "no-requeue", None
        elif field == "mem":
            yield from _memory_options(job, value)
        else:
            yield field.replace("_", "-"), None if value is True else str(value)


def _gpu_options(job: Job, per_node: int) -> Iterator[Option]:
    model = f"{job.gpu_model}:" if job.gpu_model else ""
    if per_node == 0 or job.gpu_request == "none":
        return
    if job.gpu_request == "gres":
        yield "gres", f"gpu:{model}{per_node}"
    elif job.gpu_request == "gpus-per-node":
        yield "gpus-per-node", f"{model}{per_node}"
    elif per_node % job.ntasks_per_node:
        raise RequestError(
            f"gpus_per_node={per_node} cannot be shared evenly by ntasks_per_node={job.ntasks_per_node},"
            f" and site {job.site} asks for GPUs per task"
        )
    else:
        yield "gpus-per-task", f"{model}{per_node // job.ntasks_per_node}"


def _memory_options(job: Job, mem: str) -> Iterator[Option]:
    if job.memory_request == "mem":
        yield "mem", mem
    elif job.memory_request == "mem-per-cpu" and memory_bytes(mem) > 0:
        cpus = job.ntasks_per_node * (job.resources.cpus_per_task or 1)
        yield "mem-per-cpu", f"{max(1, memory_bytes(mem) // cpus >> 20)}M"


def _with_one_gres(options: list[Option]) -> list[Option]:
    """Join several ``--gres`` into one at the position of the first: Slurm silently uses only the last."""
    requests = [value for name, value in options if name == "gres" and value]
    try:
        gpus = [f"--gres={gpus}" for gpus in gpus_in_gres(",".join(requests))[0]]
    except ValueError as error:
        raise RequestError(str(error)) from error
    gpus += (
        [f"--{name}={value}" for name, value in options if is_option_where(name, "kind", ValueKind.GPUS)]
        if gpus
        else []
    )
    if len(gpus) > 1:
        raise RequestError(
            f"GPUs are requested twice: {' and '.join(gpus)}", hint="use gpus_per_node alone, and leave gpu out of gres"
        )
    first = next((at for at, (name, _) in enumerate(options) if name == "gres"), None)
    gres = ("gres", ",".join(requests))
    return [gres if at == first else option for at, option in enumerate(options) if at == first or option[0] != "gres"]


def _site_spelling(job: Job, option: Option) -> Iterator[Option]:
    name, value = option
    if name not in job.directives:
        yield option
        return
    template = job.directives[name]
    if template is None:
        return
    yield _name_and_value(template.replace("{value}", value or ""))


def _name_and_value(text: str) -> Option:
    name, _, value = text.removeprefix("--").partition("=")
    return name, value or None
