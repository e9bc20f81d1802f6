"""A batch script as a job: its options and those that are passed through to sbatch and srun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs import trainers
from hpcjobs.errors import RequestError
from hpcjobs.job.launch import launch
from hpcjobs.job.limits import DoesNotFitError
from hpcjobs.job.models import Job, JobSpec, Layer
from hpcjobs.job.options import BatchScript, Directive, is_batch_script, read_batch_script
from hpcjobs.site.models import Containers, Environment, Resources, Site
from hpcjobs.site.resources import InScript, Treatment, ValueKind, find_option, option_of
from hpcjobs.site.yaml_file import in_plain_words

PASSED_THROUGH = ("sbatch", "srun")
"""Fields of `JobSpec` that every layer adds to."""
_NAME = re.compile(r"[a-z][a-z0-9-]*\Z", re.ASCII)
_OF_LAUNCH = frozenset(
    ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "label", "multi-prog", "het-group", "jobid", "job-name")
)
"""Options of srun that the layout of the tasks sets."""
_STREAMS = frozenset(("output", "error", "input"))


def check_passed_through(field: str, options: Sequence[str], source: str) -> None:
    """Refuse an unknown option, one with an option of hpcjobs, and one that would break the job.

    Raises RequestError: names the option and the alternative.
    """
    for option in options:
        text = f"{field} {option!r} ({source})"
        name = option.removeprefix("--").partition("=")[0]
        if not _NAME.match(name) or any(ord(char) < 32 for char in option):
            raise RequestError(f"{text}: no option", hint=f"NAME=VALUE, by {field}'s long names")
        if field == "sbatch":
            _check_sbatch(text, name)
        elif name in _OF_LAUNCH:
            raise RequestError(f"{text}: the job's own layout sets it", hint="name it as an option of the job")
        elif name in _STREAMS:
            raise RequestError(f"{text}: hpcjobs logs shows the output of the tasks; they read no input")


def _check_sbatch(text: str, name: str) -> None:
    known = find_option(name)
    if known is None or known.treatment is Treatment.PASSED:
        return
    if known.treatment is Treatment.REFUSED:
        raise RequestError(f"{text} is not passed through", hint=known.reason)
    raise RequestError(
        f"{text}: hpcjobs has this option itself", hint=f"use --{known.name}, or {known.field} in a file"
    )


def check_srun(job: Job) -> None:
    """Refuse options for an srun that the job's launcher does not start. Raises RequestError: there are some."""
    if job.srun and job.kind.runs_steps and launch(job).command[0] != "srun":
        source = job.sources.get("srun", f"site {job.site}")
        raise RequestError(
            f"srun {', '.join(job.srun)} ({source}): launcher {job.launcher} starts the tasks without srun"
        )


BATCH = "batch"
"""The launcher of a batch script, which runs it once, on the first node."""
_NOT_WITH_SCRIPT = ("preflight", "spare", "min_nodes", "container", "stage_image", "srun")
_WRAPPED = "#!/bin/sh\n# made by hpcjobs submit --wrap\n\n{}\n"


def batch_layers(layers: Sequence[Layer]) -> list[Layer]:
    """The layer of the batch script that ``layers`` name as their program; none for another program.

    A file with lines of options is one, unless a launcher is named that starts it as a task. The launcher ``batch``
    makes any script one.

    Raises RequestError: a line that sbatch would not understand, or hpcjobs cannot honour.
    """
    wrapped = _last(layers, "wrap")
    launcher = _last(layers, "launcher")
    program = _last(layers, "program")
    if wrapped is not None:
        if program:
            raise RequestError("wrap and a program exclude each other", hint="leave one of them out")
        return [Layer("wrap", JobSpec(), batch_script=_WRAPPED.format(wrapped).encode("utf-8", "surrogateescape"))]
    if not program or launcher not in (None, BATCH):
        return []
    path = _find_script(program[0], Path(_last(layers, "chdir") or ".").expanduser())
    if not is_batch_script(path) and launcher is None:
        return []
    return [_layer(read_batch_script(path))]


def _find_script(name: str, chdir: Path) -> Path:
    """The file where sbatch looks for it: in the folder that ``--chdir`` names, in this one, and on PATH."""
    path = Path(name).expanduser()
    here = (candidate for candidate in (chdir / path, path) if os.path.isfile(candidate))
    on_path = None if "/" in name or name in trainers.NAMES else shutil.which(name, mode=os.R_OK)
    return next(here, Path(on_path) if on_path else path)


def _last(layers: Sequence[Layer], field: str) -> Any:
    return next((value for layer in reversed(layers) if (value := getattr(layer.spec, field)) not in (None, ())), None)


def _layer(script: BatchScript) -> Layer:
    own: dict[str, Any] = {}
    resources: dict[str, Any] = {}
    passed: list[str] = []
    sources: dict[str, str] = {}
    for directive in script.directives:
        option, where = directive.option, f"{script.path.name}:{directive.line}"
        if option.in_script is InScript.LEFT_OUT:
            sources[option.field] = where
            continue
        if option.treatment is Treatment.PASSED or option.in_script is InScript.PASSED:
            passed.append(option.name if directive.value is None else f"{option.name}={directive.value}")
            continue
        if option.treatment is Treatment.REFUSED:
            raise RequestError(f"{where}: --{option.name} is refused", hint=option.reason)
        field = option.field
        sources[field] = where
        if field in ("name", "chdir"):
            own[field] = directive.value
        elif field == "wrap":
            raise RequestError(f"{where}: --wrap in a script has no meaning")
        else:
            value = _value(directive)
            if field == "mail_type" and field in resources:  # sbatch adds them up
                value = f"{resources[field]},{value}"
            resources[field] = value
            _convert({field: resources[field]}, where)
    request = _convert(resources, script.path.name)
    try:
        spec = JobSpec(resources=request, sbatch=tuple(passed), **own)
    except ValueError as error:
        raise RequestError(f"{sources.get('name', script.path.name)}: {error}") from error
    if isinstance(request.gpus_per_node, int | str):
        sources.setdefault("gpus_per_node", sources.get("gres", script.path.name))
    return Layer(script.path.name, spec, sources, script.path.read_bytes())


def _value(directive: Directive) -> object:
    """Return a field's value as on the command line: a time of 0 becomes UNLIMITED, bare memory megabytes."""
    kind, value = directive.option.kind, directive.value
    if value is None:
        return directive.option.bare
    if kind is ValueKind.SWITCH:
        return value != "off"
    if kind is ValueKind.TIME and value.isdecimal() and not int(value):
        return "UNLIMITED"
    if kind is ValueKind.MEMORY and value.isdecimal() and int(value):
        return f"{value}M"
    return value


def _convert(fields: Mapping[str, object], where: str) -> Resources:
    try:
        return msgspec.convert(fields, Resources, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {in_plain_words(str(error))}") from error


def check_batch(spec: JobSpec, sources: Mapping[str, str], site: Site) -> None:
    """Refuse features that need tasks started by hpcjobs. Raises RequestError: names the option."""
    if not site.kind.takes_sbatch_options and spec.wrap is not None:
        raise DoesNotFitError(
            f"--wrap: site {site.name} ({site.path}) has no Slurm to run a script",
            hint="in place of it submit the command: bash -c 'COMMAND'",
        )
    if not site.kind.takes_sbatch_options:
        raise DoesNotFitError(
            f"batch script: site {site.name} ({site.path}) has no Slurm to run it",
            hint=f"--site names a cluster; `hpcjobs submit --site {shlex.quote(site.name)} bash SCRIPT` runs the script"
            " here, without its #SBATCH lines",
        )
    for field in _NOT_WITH_SCRIPT:
        if getattr(spec, field):
            raise RequestError(
                f"{field} ({sources.get(field, 'flag')}): a batch script starts its own tasks",
                hint="--launcher srun starts the script as a task on each node",
            )


def site_of_batch(site: Site, layer: Layer) -> Site:
    """``site`` without its additions to requests, except the cluster that gets them.

    GPUs are requested with the option of the script of ``layer``.
    """
    spells_gres = "gres" in layer.sources and layer.sources.get("gpus_per_node") == layer.sources["gres"]
    return msgspec.structs.replace(
        site,
        defaults=Resources(),
        qos={},
        default_qos=None,
        gpu_request="gres" if spells_gres else "gpus-per-node",
        memory_request="mem",
        directives={},
        sbatch=tuple(option for option in site.sbatch if option_of(option)[0] == "clusters"),
        srun=(),
        modules=(),
        setup=(),
        environment=Environment(),
        env={},
        retries=None,
        containers=Containers(),
        interface=None,
    )


def batch_argv(spec: JobSpec) -> tuple[str, ...]:
    """Return the script and its arguments, for records; the job runs the copy in the run folder."""
    return spec.program or ("--wrap",)


def batch_name(spec: JobSpec) -> str:
    """Return the default name of the job: the script's, like sbatch, or ``wrap``."""
    name = Path(spec.program[0]).name if spec.program else "wrap"
    return re.sub(r"[^\w.-]", "_", name.lstrip("._-"), flags=re.ASCII)[:100] or "script"
