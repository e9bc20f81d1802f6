"""Lays a job out: tasks and GPUs on each node, hosts by name, and the cores and GPUs that each rank may use."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from hpcjobs.errors import RequestError, reason_of
from hpcjobs.job.fault_tolerance import named_nodes
from hpcjobs.job.layers import Values
from hpcjobs.site.models import Affinity, Partition, Site
from hpcjobs.site.resources import GPU_FIELDS, gpus_and_model, node_range
from hpcjobs.slurm_commands import hosts_of


def read_host_file(path: str, source: str) -> list[str]:
    """The names in the file, in its order: separated by newlines or commas, ``n1*4`` four times, ``#`` a comment.

    Args:
        source: the option that names the file, for messages.

    Raises RequestError: it cannot be read, or names no node.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{source}: the file of nodes cannot be read: {reason_of(error)}") from error
    names = [name for number, line in enumerate(lines, 1) for name in _read_line(line, f"{source}: line {number}")]
    if not names:
        raise RequestError(f"{source}: the file names no node", hint="write one name in each line")
    return names


def _read_line(line: str, where: str) -> list[str]:
    names: list[str] = []
    try:
        for entry in hosts_of(line.partition("#")[0]):
            name, _, times = entry.strip().partition("*")
            names += [name] * int(times or 1) if name else []
    except ValueError as error:
        hint = "a line is such as n1, n[1-4] or n1*2"
        raise RequestError(f"{where}, {line!r}: no list of nodes", hint=hint) from error
    return names


BY_SRUN = ("cpu_bind", "distribution", "gpu_bind")
_TO_GPUS = ("gpu_bind", "numa_binding")
_STARTED_BY_SRUN = ("srun", "torchrun", "horovod-gloo")


def choose_affinity(site: Site, values: Values, *, launcher: str) -> tuple[Affinity, dict[str, str]]:
    """Choose the binding of the ranks and the source of each value; ``None``: the launcher's default.

    A `distribution` of the job is an option of sbatch, which the step inherits. The defaults:

    - cores for each rank of a job with GPUs: a rank that changes its core leaves the memory near its GPU;
    - block:block: GPUs are numbered along the sockets, and Slurm would deal consecutive ranks to alternate sockets;
    - no binding of GPUs: ranks that see all GPUs of a node reach each other's memory, and each chooses one;
    - the NUMA node of its GPU for each rank of torchrun, where all cores of the node are the job's.
    """
    gpus, slurm = values["gpus_per_node"] or 0, site.kind.runs_steps
    gpu_count = int(str(gpus).rpartition(":")[2])
    defaults: dict[str, tuple[str, str]] = {}
    if slurm and gpu_count:
        defaults |= {"cpu_bind": ("cores", "default with GPUs"), "distribution": ("block:block", "default with GPUs")}
    if gpu_count > 1 and (not slurm or values["exclusive"] is True):
        defaults["numa_binding"] = ("node", "default with several GPUs of a node for itself")
    defaults["mpirun_bind_to"] = ("none", "default")
    chosen, sources = {}, {}
    for field in _fields_of(launcher, slurm=slurm, gpus=gpu_count > 0):
        value, source = getattr(site.affinity, field), f"site {site.name}"
        if value is None:
            value, source = defaults.get(field, (None, ""))
        if field == "distribution" and values["distribution"] is not None:
            value = None
        if value is not None and not (value == "default" and field in BY_SRUN):
            chosen[field], sources[f"affinity.{field}"] = value, source
    return replace(Affinity(), **chosen), sources


def _fields_of(launcher: str, *, slurm: bool, gpus: bool) -> tuple[str, ...]:
    """Keep the bindings that this launcher has options for; without GPUs no GPU binding, because torch would end."""
    by_srun = BY_SRUN if slurm and launcher in _STARTED_BY_SRUN else ()
    own = {"torchrun": ("numa_binding",), "mpirun": ("mpirun_bind_to",)}.get(launcher, ())
    return tuple(field for field in (*by_srun, *own) if gpus or field not in _TO_GPUS)


def srun_options(affinity: Affinity) -> tuple[str, ...]:
    """The options of the srun that starts the tasks."""
    named = ((field, getattr(affinity, field)) for field in BY_SRUN)
    return tuple(f"--{field.replace('_', '-')}={value}" for field, value in named if value is not None)


_NO_LIMIT = 1 << 30


def lay_out(values: Values, partition: Partition | None, *, one_machine: bool, spare: int = 0) -> None:
    """Settle ``nodes``, ``ntasks_per_node``, ``gpus_per_node`` and ``cpus_per_task``.

    A file of nodes is replaced by the ``nodelist`` it contains. ``ntasks``, ``gpus``, ``gpus_per_task``,
    ``ntasks_per_gpu`` and ``cpus_per_gpu`` are used up by it. An open number of nodes becomes the fewest
    nodes of ``partition`` that share tasks and GPUs evenly, and at least all of ``nodelist``: sbatch gives a job all
    of them; ``spare`` of them take no part.

    Raises RequestError: the nodes cannot share them evenly, or numbers or named nodes contradict each other.
    """
    _read_named_nodes(values)
    for field in GPU_FIELDS:
        read_gpu_model(values, field)
    _count_tasks_by_gpus(values)
    totals = [field for field in ("ntasks", "gpus") if values[field]]
    named = 0 if one_machine else max(0, len(named_nodes(values["nodelist"])) - spare)
    if values["nodes"] is None and totals:
        reason = " and ".join(values.text(field) for field in [*totals, *(["nodelist"] if named else [])])
        values.set("nodes", 1 if one_machine else _fewest_nodes(values, partition, at_least=named or 1), reason)
    if named:
        values.default("nodes", named, values.text("nodelist"))
    values.default("nodes", 1, "default")
    least, most = node_range(values["nodes"])
    if most < named:
        raise RequestError(
            f"{values.text('nodelist')} names {named + spare} nodes: {values.text('nodes')} contradicts it",
            hint=f"--nodes {named}, or fewer names: a job has all nodes of the list",
        )
    if totals and least != most:
        raise RequestError(
            f"{values.text('nodes')}: {values.text(totals[0])} is shared by a number of nodes, not by a range",
            hint=f"name one number, or {totals[0]} per node",
        )
    for total, per_node in (("gpus", "gpus_per_node"), ("ntasks", "ntasks_per_node")):
        if values[total] is not None:
            _share(values, total, per_node, least)
    _resolve_per_gpu(values)
    for field in ("ntasks", "gpus", "gpus_per_task", "ntasks_per_gpu", "cpus_per_gpu"):
        values.clear(field)


def _read_named_nodes(values: Values) -> None:
    """Replace a file of nodes by their names, which are counted."""
    if values["nodefile"] and values["nodelist"]:
        raise RequestError(
            f"{values.text('nodelist')} beside {values.text('nodefile')}: both name the nodes",
            hint="leave one of them out",
        )
    field = "nodefile" if values["nodefile"] else "nodelist"
    if values["nodefile"] or "/" in (values["nodelist"] or ""):
        source = values.text(field)
        names = read_host_file(values[field], source)
        values.clear("nodefile")
        values.set("nodelist", ",".join(names), source)


def read_gpu_model(values: Values, field: str) -> None:
    """Leave the count in a field of GPUs, and the model, if one is named, in ``gpu_model``."""
    if (text := values[field]) is not None:
        values[field], model = gpus_and_model(text)
        if model is not None:
            values.set("gpu_model", model, values.sources[field])


def _count_tasks_by_gpus(values: Values) -> None:
    """Return the number of tasks if total GPUs and GPUs per task, or tasks per GPU, define it."""
    if values["ntasks"] is None and values["ntasks_per_node"] is None and values["gpus"]:
        if values["gpus_per_task"]:
            if values["gpus"] % values["gpus_per_task"]:
                raise RequestError(f"{values.text('gpus')} is no multiple of {values.text('gpus_per_task')}")
            values.set("ntasks", values["gpus"] // values["gpus_per_task"], values.text("gpus"))
        elif values["ntasks_per_gpu"]:
            values.set("ntasks", values["gpus"] * values["ntasks_per_gpu"], values.text("gpus"))


def _fewest_nodes(values: Values, partition: Partition | None, *, at_least: int) -> int:
    """Return the fewest nodes of ``partition``, ``at_least`` or more, for an even division of tasks and GPUs."""
    shapes = () if partition is None else partition.groups
    gpus = max((group.gpus for group in shapes), default=0) or _NO_LIMIT
    cpus = max((group.cpus for group in shapes), default=_NO_LIMIT)
    most_gpus = values["gpus_per_node"] or gpus
    most_tasks = values["ntasks_per_node"] or cpus // (values["cpus_per_task"] or 1) or 1
    if values["ntasks_per_node"] is None:
        if values["gpus_per_task"]:
            most_tasks = min(most_tasks, most_gpus // values["gpus_per_task"] or 1)
        elif values["gpus_per_node"]:
            most_tasks = values["gpus_per_node"] * (values["ntasks_per_gpu"] or 1)
    totals = [(values["ntasks"] or 0, most_tasks), (values["gpus"] or 0, most_gpus)]
    largest = max(total for total, _ in totals)
    return next(
        (
            n
            for n in range(at_least, min(largest, 100_000) + 1)
            if all(total % n == 0 and total // n <= most for total, most in totals)
        ),
        at_least,  # the limits of the partition explain requests that do not fit
    )


def _share(values: Values, total: str, per_node: str, nodes: int) -> None:
    share, rest = divmod(values[total], nodes)
    if rest:
        raise RequestError(
            f"{values.text(total)}: {values.text('nodes')} cannot divide it evenly",
            hint=f"every node gets the same share: choose a multiple of {nodes}, or another number of nodes",
        )
    if values[per_node] is not None and values[per_node] != share:
        raise RequestError(
            f"{values.text(total)} is {share} on each of {values.text('nodes')}: {values.text(per_node)} contradicts",
            hint="leave one of them out",
        )
    values.set(per_node, share, values.text(total))


def _resolve_per_gpu(values: Values) -> None:
    """Resolve values per GPU or per task, once a node's GPUs or tasks are known."""
    if values["gpus_per_task"]:
        if values["ntasks_per_node"] is None and values["gpus_per_node"]:
            values.set(
                "ntasks_per_node", values["gpus_per_node"] // values["gpus_per_task"], values.text("gpus_per_task")
            )
        values.default("ntasks_per_node", 1, "default")
        gpus = values["gpus_per_task"] * values["ntasks_per_node"]
        if values["gpus_per_node"] not in (None, gpus):
            raise RequestError(
                f"{values.text('gpus_per_task')} x {values.text('ntasks_per_node')} = {gpus} GPUs per node:"
                f" {values.text('gpus_per_node')} contradicts it"
            )
        values.default("gpus_per_node", gpus, values.text("gpus_per_task"))
    per_node = values["gpus_per_node"]
    if per_node and values["ntasks_per_gpu"]:
        values.default("ntasks_per_node", per_node * values["ntasks_per_gpu"], values.text("ntasks_per_gpu"))
    values.default("ntasks_per_node", per_node or 1, "one task per GPU" if per_node else "default")
    if values["cpus_per_gpu"]:
        cpus, rest = divmod(values["cpus_per_gpu"] * (per_node or 0), values["ntasks_per_node"])
        if rest or not cpus:
            raise RequestError(
                f"{values.text('cpus_per_gpu')}: the CPUs of {per_node or 0} GPUs cannot be shared evenly by"
                f" {values.text('ntasks_per_node')}",
                hint="name cpus_per_task",
            )
        values.set("cpus_per_task", cpus, values.text("cpus_per_gpu"))
