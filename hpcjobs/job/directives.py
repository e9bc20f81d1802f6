"""A resolved job as options of sbatch, for the job script and for submitit."""

from __future__ import annotations

from collections.abc import Iterator

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.site.resources import ValueKind, gpus_in_gres, is_option_where
from hpcjobs.units import memory_bytes

Option = tuple[str, str | None]
"""A long option of sbatch without its dashes, and its value (None: a flag)."""


def sbatch_options(job: Job) -> list[Option]:
    """Every option ``job`` sends to sbatch except job name and output, in the order of `Resources`.

    The site's ``directives`` rename or remove options; passed-through options (``sbatch``) come last.

    Raises:
        RequestError: GPUs are requested twice, or cannot be shared by the tasks.
    """
    options = [mapped for option in _plain_options(job) for mapped in _site_spelling(job, option)]
    return _with_one_gres(options + [_split(extra) for extra in job.sbatch])


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
    yield _split(template.replace("{value}", value or ""))


def _split(text: str) -> Option:
    name, _, value = text.removeprefix("--").partition("=")
    return name, value or None
