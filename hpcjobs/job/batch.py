"""A batch script as a job: its options become the lowest layer of the request, and it starts its own tasks.

It asks Slurm for what sbatch would ask for it: a site's defaults, software and spellings are not added.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.job.batch_script import BatchScript, Directive, is_batch_script, read_batch_script
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.job.program import trainers
from hpcjobs.site.containers import Containers
from hpcjobs.site.models import Environment, Resources, Site
from hpcjobs.site.sbatch import Treatment, option_of
from hpcjobs.site.type_errors import in_plain_words

BATCH = "batch"
"""The launcher of a batch script, which runs it once, on the first node."""
_PASSED = ("export", "export-file")
"""Refused for other programs, whose tasks hpcjobs starts."""
_NOT_SENT = ("output", "error", "quiet", "verbose", "ignore-pbs", "parsable", "test-only", "wait")
"""Options of a script that Slurm does not get: the run folder has the output, and some are of the command itself."""
_NOT_WITH_SCRIPT = ("preflight", "spare", "min_nodes", "container", "stage_image", "srun")
_WRAPPED = "#!/bin/sh\n# made by hpcjobs submit --wrap\n\n{}\n"


def batch_layers(layers: Sequence[Layer]) -> list[Layer]:
    """The layer of the batch script that ``layers`` name as their program; none for another program.

    A file with lines of options is one, unless a launcher is named that starts it as a task. The launcher ``batch``
    makes any script one.

    Raises:
        RequestError: a line that sbatch would not understand, or hpcjobs cannot honour.
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
    on_path = None if "/" in name or name in trainers() else shutil.which(name, mode=os.R_OK)
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
        if option.name in _NOT_SENT:
            sources[option.field] = where
            continue
        if option.treatment is Treatment.PASSED or option.name in _PASSED:
            passed.append(option.name if directive.value is None else f"{option.name}={directive.value}")
            continue
        if option.treatment is Treatment.REFUSED:
            raise RequestError(f"{where}: --{option.name} is refused", hint=option.reason)
        field = {"job_name": "name", "no_requeue": "requeue"}.get(option.field, option.field)
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
    """The value of a field as the command line would have it: a time of 0 is no limit, bare memory is megabytes."""
    name, value = directive.option.name, directive.value
    if name == "no-requeue":
        return False
    if name == "no-kill":
        return value != "off"
    if value is None:
        return "100" if name == "nice" else True
    if name in ("time", "time-min") and value.isdecimal() and not int(value):
        return "UNLIMITED"
    if name in ("mem", "mem-per-cpu", "mem-per-gpu") and value.isdecimal() and int(value):
        return f"{value}M"
    return value


def _convert(fields: Mapping[str, object], where: str) -> Resources:
    try:
        return msgspec.convert(fields, Resources, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}: {in_plain_words(str(error))}") from error


def check_batch(spec: JobSpec, sources: Mapping[str, str], site: Site) -> None:
    """Refuse what only tasks that hpcjobs starts can have.

    Raises:
        RequestError: names the option.
    """
    if site.scheduler != "slurm" and spec.wrap is not None:
        raise RequestError(
            f"--wrap: site {site.name} ({site.path}) has no Slurm to run a script",
            hint="in place of it submit the command: bash -c 'COMMAND'",
        )
    if site.scheduler != "slurm":
        raise RequestError(
            f"batch script: site {site.name} ({site.path}) has no Slurm to run it",
            hint="--site names a cluster; --launcher spawn runs the script here, as any program",
        )
    for field in _NOT_WITH_SCRIPT:
        if getattr(spec, field):
            raise RequestError(
                f"{field} ({sources.get(field, 'flag')}): a batch script starts its own tasks",
                hint="--launcher srun starts the script as a task on each node",
            )


def site_of_batch(site: Site, layer: Layer) -> Site:
    """``site`` without what it adds to requests, but for the cluster that gets them.

    GPUs are spelled as the script of ``layer`` spells them.
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
    """The script and its arguments, for records; the run folder's copy is what runs."""
    return spec.program or ("--wrap",)


def batch_name(spec: JobSpec) -> str:
    """The job's name where none is given: that of the script, as sbatch has it, or ``wrap``."""
    name = Path(spec.program[0]).name if spec.program else "wrap"
    return re.sub(r"[^\w.-]", "_", name.lstrip("._-"), flags=re.ASCII)[:100] or "script"
