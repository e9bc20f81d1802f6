"""Site and request resolved into one frozen `Job`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import hpcjobs
from hpcjobs import trainers
from hpcjobs.containers.images import expand_path, find
from hpcjobs.containers.look import PACKAGE, least_driver, program_there
from hpcjobs.errors import RequestError, nearest
from hpcjobs.guards import limit_env
from hpcjobs.job.batch import (
    BATCH,
    PASSED_THROUGH,
    batch_argv,
    batch_name,
    check_batch,
    check_passed_through,
    check_srun,
    site_of_batch,
)
from hpcjobs.job.environment import check_env, choose_node_python, choose_python, locate_run_root, prologue
from hpcjobs.job.fault_tolerance import (
    complete_address,
    mail_options,
    notify_words,
    preemption_messages,
    preflight_words,
    resolve_elastic,
    resolve_retries,
    still_left_out,
)
from hpcjobs.job.launch import LAUNCHERS
from hpcjobs.job.layers import Values, merge_resources, named_partitions
from hpcjobs.job.layout import choose_affinity, lay_out, read_gpu_model
from hpcjobs.job.limits import add_mandatory, check_limits
from hpcjobs.job.models import Bind, Inside, Job, JobSpec, Layer
from hpcjobs.job.program import check_program, default_name, program_argv
from hpcjobs.site.figures import Figure, named_figures, parse_metric
from hpcjobs.site.models import Partition, Resources, Site
from hpcjobs.site.resources import node_range
from hpcjobs.slurm_commands import hosts_of
from hpcjobs.units import time_limit_s


def resolve(layers: Sequence[Layer], site: Site, *, avoid: Mapping[str, str] | None = None) -> Job:
    """The job that ``layers`` (later ones win) ask of ``site``, away from the nodes ``avoid`` (each with the reason).

    Precedence: site defaults < partition defaults < layers in order. An explicit null clears; of ``exclude`` it
    clears ``avoid`` too.

    Raises RequestError: no program, an unknown partition or launcher, or a limit exceeded; every limit that is exceeded
    is named at once.
    """
    spec, sources = _merge_layers(layers)
    batch = next((layer for layer in layers if layer.batch_script is not None), None)
    script = None if batch is None else batch.batch_script
    if batch is not None:
        check_batch(spec, sources, site)
        site = site_of_batch(site, batch)
    values, partitions = _resolve_values(layers, site, spec, batch=script is not None)
    add_mandatory(values, site)
    launcher = _launcher(spec.launcher, site) if script is None else BATCH
    sources.setdefault("launcher", f"site {site.name}" if script is None else "batch script")
    chdir = Path(spec.chdir or ".").expanduser().absolute()
    if not os.path.isdir(chdir):
        raise RequestError(f"chdir {chdir} ({sources.get('chdir', 'here')}): no such folder")
    run_root = locate_run_root(site, chdir)
    for folder in (chdir, run_root):
        if any("\ud800" <= char <= "\udfff" for char in str(folder)):
            raise RequestError(
                f"the name of folder {str(folder)!r} is not UTF-8 text", hint="choose or make another one"
            )
    inside = _container(spec, sources, site, values, launcher=launcher, folders=(chdir, run_root))
    on_node = choose_python(site)
    python = on_node if inside is None else site.containers.python
    argv = program_argv(spec.program, python=python, chdir=chdir) if script is None else batch_argv(spec)
    if script is None and not spec.no_check and "{" not in "".join(spec.program):  # a sweep checks its values
        check_program(spec.program, site, python=python, chdir=chdir, in_image=inside is not None)
    hosts = _hosts(values, site)
    retries, signal_before_s = resolve_retries(spec, site, values)
    for field, value in mail_options(spec, site).items():
        values.default(field, value, "notify")
    complete_address(values, site)
    resolve_elastic(spec, values, launcher=launcher, retries=retries)
    least, most = node_range(values["nodes"] or 1)
    left_out = _leave_out(avoid or {}, values, partitions, nodes=least + (spec.spare or 0))
    gpu_model = _gpu_model(values, partitions)
    name = spec.name or (default_name(spec.program) if script is None else batch_name(spec))
    resources = msgspec.convert({f: values[f] for f in Resources.__struct_fields__}, Resources)
    affinity, affinity_sources = choose_affinity(site, values, launcher=launcher)
    job = Job(
        name=name,
        site=site.name,
        site_file=site.path,
        untrusted=site.untrusted,
        messages=(
            *(message for applied in site.policies for message in applied.policy.messages),
            *preemption_messages(retries, partitions),
        ),
        policies=site.policies,
        rehearsal=site.rehearsal,
        scheduler=site.scheduler,
        slurm_conf=site.slurm_conf,
        argv=argv,
        chdir=str(chdir),
        snapshot=bool(spec.snapshot),
        template=spec.template or ("job" if script is None else "batch"),
        launcher=launcher,
        python=python,
        resources=resources,
        time_limit_s=time_limit_s(resources.time if isinstance(resources.time, str) else None),
        nodes=least,
        max_nodes=most if most > least else None,
        ntasks_per_node=values["ntasks_per_node"] if script is None else 1,
        sources={**(batch.sources if batch else {}), **values.sources, **affinity_sources, **sources},
        gpu_model=gpu_model,
        gpu_request=site.gpu_request,
        memory_request=site.memory_request,
        directives=site.directives,
        sbatch=(*site.sbatch, *spec.sbatch),
        srun=(*site.srun, *spec.srun),
        mpi=site.mpi,
        affinity=affinity,
        hosts=hosts,
        interface=site.interface or ("lo" if not site.kind.has_nodes and not hosts else None),
        address_suffix=site.address_suffix,
        prologue=prologue(site, environment=inside is None),
        env=limit_env(site.env | spec.env, sources),
        run_root=str(run_root),
        retries=retries,
        node_python=choose_node_python(site),
        signal_before_s=signal_before_s,
        left_out=left_out,
        preflight=_preflight(spec, site, values, python=on_node, launcher=launcher),
        spare=spec.spare or 0,
        min_nodes=spec.min_nodes,
        container=inside,
        monitor=_monitor(spec),
        figures=_merge_figures(layers, site),
        notify=notify_words(spec, site, name),
        layers=tuple(layer for layer in layers if layer.spec != JobSpec() or layer.batch_script is not None),
    )
    check_env(job.env, job.sources, in_image=job.container is not None)
    check_srun(job)
    check_limits(job, site, partitions)
    return job


def _merge_figures(layers: Sequence[Layer], site: Site) -> dict[str, Figure]:
    """Return the figures of all layers by name, the last layer first; null removes one of a lower layer."""
    merged: dict[str, Figure | None] = {}
    stated = [named_figures(site.figures)]
    for layer in layers:
        stated.append(named_figures(layer.spec.figures))
        stated += [{**parse_metric(text)} for text in reversed(layer.spec.metric)]
    for figures in reversed(stated):
        merged |= {name: figure for name, figure in figures.items() if name not in merged}
    return {name: figure for name, figure in merged.items() if figure is not None}


def _monitor(spec: JobSpec) -> bool:
    """Whether the job has a sampler; a trainer's own would write to the same files."""
    if spec.monitor and "--monitor" in spec.program[1:] and spec.program[0] in trainers.NAMES:
        raise RequestError(f"{spec.program[0]} --monitor samples already", hint="leave one of the two --monitor out")
    return bool(spec.monitor)


def _merge_layers(layers: Sequence[Layer]) -> tuple[JobSpec, dict[str, str]]:
    """Everything but the resources, the last word winning (``env`` by variable), with sources."""
    fields: dict[str, Any] = {"env": {}}
    sources: dict[str, str] = {}
    for source, spec, own_sources, script in layers:
        for field in set(JobSpec.__struct_fields__) - {"resources", "env", "figures", "metric"}:
            value = getattr(spec, field)
            if value in (None, ()):
                continue
            if field in PASSED_THROUGH:
                if script is None:
                    check_passed_through(field, value, source)
                value = (*fields.get(field, ()), *value)
            fields[field], sources[field] = value, own_sources.get(field, source)
        for name, value in spec.env.items():
            fields["env"][name], sources[f"env.{name}"] = value, source
    return JobSpec(**fields), sources


def _resolve_values(
    layers: Sequence[Layer], site: Site, spec: JobSpec, *, batch: bool
) -> tuple[Values, dict[str, Partition]]:
    """Every resource resolved, tasks and GPUs by the node, and the partitions named.

    A batch script stays unchanged: it lays out its tasks itself, and Slurm alone knows its limits.
    """
    values = merge_resources(layers, site, batch=batch)
    partitions = {} if batch else named_partitions(values, site)
    if site.kind.may_requeue:
        values.default("open_mode", "append", "default: a requeued job keeps its log")
    if batch:
        read_gpu_model(values, "gpus_per_node")
        return values, partitions
    one_machine = not site.kind.has_nodes
    if site.chooses_partition and not partitions:
        partitions = dict(site.partitions)
    lay_out(values, _typical(values, partitions), one_machine=one_machine, spare=spec.spare or 0)
    return values, partitions


def _typical(values: Values, partitions: Mapping[str, Partition]) -> Partition | None:
    """Return the partition that divides a total: the first one, for a job with GPUs the first with GPUs."""
    with_gpus = [one for one in partitions.values() if any(group.gpus for group in one.groups)]
    has_gpus = any(values[field] not in (None, 0, "0") for field in ("gpus", "gpus_per_node", "gpus_per_task"))
    return next(iter(with_gpus if has_gpus and with_gpus else partitions.values()), None)


def _gpu_model(values: Values, partitions: Mapping[str, Partition]) -> str | None:
    """The requested model, or the one model that all GPUs of the partitions have."""
    models = {partition.gpu_model for partition in partitions.values()}
    named: str | None = values["gpu_model"]
    return named or (models.pop() if len(models) == 1 else None)


def _launcher(requested: str | None, site: Site) -> str:
    known = [name for name, launcher in LAUNCHERS.items() if launcher.fits(site.kind)]
    allowed = [name for name in (site.launchers or known) if name in known]
    if requested is not None and requested not in allowed:
        raise RequestError(
            f"launcher {requested!r} is not available on site {site.name} ({site.path})",
            hint=nearest("" if requested in LAUNCHERS else requested, allowed),
        )
    return requested or allowed[0]


def _preflight(spec: JobSpec, site: Site, values: Values, *, python: str, launcher: str) -> tuple[str, ...]:
    """The command that checks the nodes, where a preflight is requested."""
    if not (spec.preflight or spec.spare):
        return ()
    if not site.kind.has_nodes:
        raise RequestError(f"site {site.name} ({site.path}) is one machine", hint="leave --preflight and --spare out")
    nodes = values["nodes"] if spec.spare else None
    cpus = values["cpus_per_task"]
    return preflight_words(site, python=python, cpus_per_task=cpus, nodes=nodes, launcher=launcher)


def _container(
    spec: JobSpec,
    sources: Mapping[str, str],
    site: Site,
    values: Values,
    *,
    launcher: str,
    folders: tuple[Path, ...],
) -> Inside | None:
    """The requested image, or the site's default, with all visible folders; ``folders`` keep their own paths."""
    name = spec.container or site.containers.default
    if name is None or name == "none":
        if spec.stage_image:
            raise RequestError("--stage-image: the job has no container", hint="use --container NAME too")
        return None
    containers, source = site.containers, sources.get("container", f"default of site {site.name}")
    image = find(name, site, source=source)
    if any(ord(char) < 32 for char in image.path):
        raise RequestError(f"container {name!r} ({source}): no path of an image holds control characters")
    _check_launcher(launcher, site)
    if spec.stage_image and (not site.kind.has_nodes or containers.runtime == "pyxis"):
        why = "has pyxis, which keeps its own copies" if site.kind.has_nodes else "is one machine"
        raise RequestError(f"--stage-image: site {site.name} ({site.path}) {why}", hint="leave it out")
    gpu = containers.gpu or ("nv" if values["gpus_per_node"] else "none")
    cuda = image.facts.cuda if image.facts else None
    return Inside(
        runtime=containers.runtime,
        program=program_there(site),
        name=image.name,
        image=image.path,
        fingerprint=image.fingerprint,
        binds=_binds(site, folders),
        gpu=None if gpu == "none" else gpu,
        clean_env=containers.clean_env,
        home=containers.home,
        args=containers.args,
        stage=containers.stage if spec.stage_image else None,
        scratch=_on_the_node(site.scratch) if site.scratch else None,
        driver=least_driver(cuda) if cuda and gpu == "nv" else None,
        package_folder=PACKAGE,
    )


def _check_launcher(launcher: str, site: Site) -> None:
    if launcher == "horovodrun":
        why = "it starts its tasks by ssh, out of the image"
        raise RequestError(f"launcher {launcher} and a container: {why}", hint="use --launcher horovod-gloo")
    if site.containers.runtime == "pyxis" and launcher not in ("srun", "torchrun"):
        raise RequestError(
            f"launcher {launcher} and a container: pyxis of site {site.name} ({site.path}) works by srun alone",
            hint="use --launcher srun or torchrun",
        )


def _binds(site: Site, folders: tuple[Path, ...]) -> tuple[Bind, ...]:
    binds = [Bind(str(Path(hpcjobs.__file__).resolve().parent), f"{PACKAGE}/hpcjobs", "ro")]
    for text in site.containers.binds:
        source, _, rest = expand_path(text, site, "containers.binds").partition(":")
        target, _, mode = rest.partition(":")
        binds.append(Bind(source, target or source, mode or "rw"))
    outermost = [one for one in folders if not any(one != other and one.is_relative_to(other) for other in folders)]
    binds += [Bind(str(folder), str(folder), "rw") for folder in dict.fromkeys(outermost)]
    if odd := [path for bind in binds for path in (bind.source, bind.target) if re.search(r"[:,\x00-\x1f]", path)]:
        raise RequestError(
            f"{odd[0]!r}: a path with a colon, a comma or a control character cannot be seen in an image"
        )
    return tuple(binds)


def _on_the_node(text: str) -> str:
    """Quote ``text`` for a shell, except plain ``$VARIABLES``."""
    parts = re.split(r"(\$\w+|\$\{\w+\})", text)
    return "".join(
        f'"{part}"' if number % 2 else (shlex.quote(part) if part else "") for number, part in enumerate(parts)
    )


def _leave_out(
    avoid: Mapping[str, str], values: Values, partitions: Mapping[str, Partition], *, nodes: int
) -> dict[str, str]:
    """Exclude known bad nodes, if enough others remain, in addition to the user's; return them with reasons."""
    excluded, source = values["exclude"], values.sources.get("exclude")
    if excluded is None and source is not None:
        return {}
    available = sum(partition.node_count for partition in partitions.values()) if partitions else None
    avoided = still_left_out(avoid, nodes=nodes, nodelist=values["nodelist"], available=available)
    if avoided:
        sources = ", ".join(filter(None, (source, "record of nodes")))
        values.set("exclude", ",".join(filter(None, (excluded, *avoided))), sources)
    return avoided


def _hosts(values: Values, site: Site) -> tuple[str, ...]:
    """The first of the hosts named for a site that has no scheduler to ask."""
    if site.kind.has_nodes:
        return ()
    try:
        return tuple(hosts_of(values["nodelist"] or ""))[: node_range(values["nodes"])[0]]
    except ValueError as error:
        raise RequestError(f"nodelist {values['nodelist']!r}: {error}", hint="such as n1,n[03-05]") from error
