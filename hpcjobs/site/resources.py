"""The resources that a job requests from Slurm."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hpcjobs.errors import nearest
from hpcjobs.site.checks import check_count, check_line
from hpcjobs.site.frozen import Frozen
from hpcjobs.units import requested_memory, requested_time

_NODES = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?\Z", re.ASCII)
_GPUS = re.compile(r"(?:(?P<model>[A-Za-z0-9][\w.-]*):)?(?P<count>\d{1,8})\Z", re.ASCII)
_GPU_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::(?!\d+[kKmMgGtTpP]\Z)(?P<model>(?=[\w.-]*[A-Za-z])[A-Za-z0-9][\w.-]*|\d+(?=:)))?"
    r"(?:[:=](?P<count>\d{1,8}))?(?:\(.*\))?\Z",
    re.ASCII,
)
_LIKE_GPUS = re.compile(r"\s*(?:gres\s*[:/]\s*)?gpu(?![\w.-])", re.ASCII | re.IGNORECASE)
"""Every spelling that Slurm may take for GPUs: ``gpu:+4``, ``GPU:4``, ``gpu:4k``."""


GPU_FIELDS = ("gpus", "gpus_per_node", "gpus_per_task")


def node_range(nodes: int | str) -> tuple[int, int]:
    """The fewest and the most nodes of ``4`` or ``2-4``.

    Raises:
        ValueError: neither of these.
    """
    match = _NODES.match(str(nodes))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if match is not None and match[2] is None and least < 1:
        raise ValueError(f"nodes must be 1 or more, not {nodes}")
    if not 1 <= least <= most:
        raise ValueError(f"nodes {nodes!r} is not understood; write 4, or 2-4 for a range")
    return least, most


def gpus_and_model(gpus: int | str, field: str = "gpus_per_node") -> tuple[int, str | None]:
    """The count, and the model if one is named, of ``4`` or ``v100:4``.

    Raises:
        ValueError: neither of these.
    """
    match = _GPUS.match(str(gpus))
    if match is None:
        raise ValueError(f"{field} {gpus!r} is not understood; write 4, or v100:4 for a model")
    return int(match["count"]), match["model"]


def gpus_in_gres(gres: str) -> tuple[list[str], list[str]]:
    """The GPU requests of a ``--gres`` value as ``gpus_per_node`` has them, and what else it asks for.

    Raises:
        ValueError: a request that Slurm may take for GPUs is not understood.
    """
    gpus: list[str] = []
    others: list[str] = []
    for part in re.split(r",(?![^()]*\))", gres):
        match = _GPU_GRES.match(part)
        if match is None and _LIKE_GPUS.match(part):
            raise ValueError(f"gres {part!r} is not understood; write gpu:4, or gpu:v100:4 for a model")
        if match is None:
            others.append(part)
        else:
            gpus.append((f"{match['model']}:" if match["model"] else "") + (match["count"] or "1"))
    return gpus, others


class Resources(Frozen, frozen=True):
    """What a job asks Slurm for: each field is one long option of sbatch, spelled with underscores.

    A field left out keeps the value of the layer below (site < partition < spec file < flags); an
    explicit null clears it. To support a further sbatch option, add a field here.
    """

    partition: str | None | UnsetType = UNSET
    """Partition, or several, ``a,b``: one that fits is enough."""
    nodes: int | str | None | UnsetType = UNSET
    """Or a range: ``2-4``."""
    ntasks: int | None | UnsetType = UNSET
    """Tasks over all nodes."""
    ntasks_per_node: int | None | UnsetType = UNSET
    """Tasks on each node; one per GPU by default."""
    cpus_per_task: int | None | UnsetType = UNSET
    """CPUs of each task."""
    cpus_per_gpu: int | None | UnsetType = UNSET
    """CPUs for each GPU; an alternative to ``cpus_per_task``."""
    gpus: int | str | None | UnsetType = UNSET
    """GPUs over all nodes."""
    gpus_per_node: int | str | None | UnsetType = UNSET
    """Or with a model: ``v100:4``; so ``gpus`` and ``gpus_per_task``."""
    gpus_per_task: int | str | None | UnsetType = UNSET
    """GPUs of each task; Slurm lets a task see its own alone."""
    ntasks_per_gpu: int | None | UnsetType = UNSET
    """Tasks that share each GPU."""
    mem: int | str | None | UnsetType = UNSET
    """Memory of each node, with a unit (``64G``), or megabytes, as sbatch reads a number; ``0``: all of it."""
    mem_per_cpu: int | str | None | UnsetType = UNSET
    """Memory for each CPU."""
    mem_per_gpu: int | str | None | UnsetType = UNSET
    """Memory for each GPU."""
    time: str | None | UnsetType = UNSET
    """Time limit, with a unit (``2h``) or as Slurm writes it (``1-12:00:00``, ``UNLIMITED``)."""
    time_min: str | None | UnsetType = UNSET
    """The least time limit that will do: Slurm may lower ``time`` to it to start the job sooner."""
    account: str | None | UnsetType = UNSET
    """Account that is charged."""
    qos: str | None | UnsetType = UNSET
    """Quality of service."""
    constraint: str | None | UnsetType = UNSET
    """Features that the nodes must have."""
    exclusive: bool | str | None | UnsetType = UNSET
    """true: no other job on the nodes; or ``user``, ``mcs``, ``topo``."""
    array: str | None | UnsetType = UNSET
    """Indices of a job array (``0-9%2``)."""
    dependency: str | None | UnsetType = UNSET
    """Jobs that this one waits for (``afterok:42``)."""
    begin: str | None | UnsetType = UNSET
    """Earliest start."""
    deadline: str | None | UnsetType = UNSET
    """The job is removed if it cannot end by then."""
    nodelist: str | None | UnsetType = UNSET
    """Nodes that the job must have; on a local site, the hosts that mpirun reaches by ssh."""
    nodefile: str | None | UnsetType = UNSET
    """File that names these nodes, separated by commas or newlines; ``nodelist`` is one too if it has a ``/``."""
    exclude: str | None | UnsetType = UNSET
    """Nodes that the job must not have; null also forgets the recorded bad nodes."""
    reservation: str | None | UnsetType = UNSET
    """Reservation that the job runs in."""
    licenses: str | None | UnsetType = UNSET
    """Licences, ``NAME:COUNT``."""
    gres: str | None | UnsetType = UNSET
    """Generic resources of each node; GPUs among them count as ``gpus_per_node``."""
    tmp: str | None | UnsetType = UNSET
    """Least disk space of a node's temporary folder."""
    clusters: str | None | UnsetType = UNSET
    """Refused in a job: give another cluster a site of its own."""
    comment: str | None | UnsetType = UNSET
    """Text that the accounting keeps."""
    wckey: str | None | UnsetType = UNSET
    """Workload characterization key."""
    mail_type: str | None | UnsetType = UNSET
    """Events that Slurm sends a mail for (``END,FAIL``)."""
    mail_user: str | None | UnsetType = UNSET
    """Who gets the mail."""
    nice: int | None | UnsetType = UNSET
    """Lowers the priority by so much."""
    priority: int | None | UnsetType = UNSET
    """Priority, where you may set one."""
    hold: bool | None | UnsetType = UNSET
    """Submitted, but not started before it is released."""
    requeue: bool | None | UnsetType = UNSET
    """Whether Slurm may start the job again after a node has failed or it was preempted."""
    open_mode: Literal["append", "truncate"] | None | UnsetType = UNSET
    """What a job that is started again does with its log."""
    signal: str | None | UnsetType = UNSET
    """Signal ahead of the time limit, ``B:USR1@300``; ``signal_before`` is usually the better way."""
    switches: str | None | UnsetType = UNSET
    """Most leaf switches, and how long to wait for them (``1@2h``)."""
    contiguous: bool | None | UnsetType = UNSET
    """Only nodes that are neighbours."""
    oversubscribe: bool | None | UnsetType = UNSET
    """Nodes and CPUs may be shared with other jobs."""
    overcommit: bool | None | UnsetType = UNSET
    """More tasks than CPUs."""
    spread_job: bool | None | UnsetType = UNSET
    """Over as many nodes as possible."""
    core_spec: int | None | UnsetType = UNSET
    """Cores of each node that are left to the system."""
    sockets_per_node: int | None | UnsetType = UNSET
    """Only nodes with at least so many sockets."""
    cores_per_socket: int | None | UnsetType = UNSET
    """Only nodes with at least so many cores per socket."""
    threads_per_core: int | None | UnsetType = UNSET
    """Threads of each core that are used."""
    ntasks_per_socket: int | None | UnsetType = UNSET
    """Most tasks on each socket."""
    ntasks_per_core: int | None | UnsetType = UNSET
    """Most tasks on each core."""
    hint: str | None | UnsetType = UNSET
    """How tasks are bound (``nomultithread``, ``compute_bound``, ``memory_bound``)."""
    distribution: str | None | UnsetType = UNSET
    """How tasks are spread over nodes and sockets (``block:cyclic``)."""
    cpu_freq: str | None | UnsetType = UNSET
    """Frequency of the CPUs."""
    gpu_freq: str | None | UnsetType = UNSET
    """Frequency of the GPUs."""
    network: str | None | UnsetType = UNSET
    """Options of the network, of the switch or Slingshot plugin."""
    power: str | None | UnsetType = UNSET
    """Power management; not in newer versions of Slurm."""
    prefer: str | None | UnsetType = UNSET
    """Features that the nodes should have, if some are free."""
    no_kill: bool | None | UnsetType = UNSET
    """The job continues when one of its nodes fails; set by ``min_nodes``."""
    profile: str | None | UnsetType = UNSET
    """What acct_gather_profile records."""
    acctg_freq: str | None | UnsetType = UNSET
    """How often usage is sampled."""
    bb: str | None | UnsetType = UNSET
    """Burst buffer."""
    bbf: str | None | UnsetType = UNSET
    """File that describes a burst buffer."""

    def __post_init__(self) -> None:
        for field, normalize in _SPELLING.items():
            value = getattr(self, field)
            if isinstance(value, int | str):
                try:
                    self._set(field, normalize(str(value)))
                except ValueError as error:
                    raise ValueError(f"{field}: {error}") from error
        for field in _COUNTS:
            value = getattr(self, field)
            if isinstance(value, int):
                check_count(value, field)
        if isinstance(self.core_spec, int):
            check_count(self.core_spec, "core_spec", least=0)
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, str):
                check_line(value, field)
        if isinstance(self.nodes, int | str):
            least, most = node_range(self.nodes)
            self._set("nodes", least if least == most else f"{least}-{most}")
        if isinstance(self.gres, str):
            self._move_gpus(self.gres)
        for field in GPU_FIELDS:
            if isinstance(gpus := getattr(self, field), int | str):
                count, model = gpus_and_model(gpus, field)
                self._set(field, f"{model}:{count}" if model else count)

    def _move_gpus(self, gres: str) -> None:
        """GPUs have one field, whatever spelling asks for them: task layout and containers look there."""
        gpus, others = gpus_in_gres(gres)
        if not gpus:
            return
        beside = [f"{f}={value}" for f in GPU_FIELDS if isinstance(value := getattr(self, f), int | str)]
        if len(gpus) > 1 or beside:
            also = "" if len(gpus) > 1 else f" beside {', '.join(beside)}"
            raise ValueError(f"gres {gres!r}{also}: GPUs are requested twice; use gpus_per_node alone (4, or v100:4)")
        self._set("gpus_per_node", gpus[0])
        self._set("gres", ",".join(others) if others else UNSET)

    def _set(self, field: str, value: object) -> None:
        msgspec.structs.force_setattr(self, field, value)


def check_fields(names: tuple[str, ...], what: str) -> None:
    """Refuse a name in ``what`` that is no option of a job.

    Raises:
        ValueError: names it.
    """
    for name in names:
        if name not in Resources.__struct_fields__:
            raise ValueError(f"{what} {name!r}: no option of a job; {nearest(name, Resources.__struct_fields__)}")


_SPELLING: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(("time", "time_min"), requested_time),
    **dict.fromkeys(("mem", "mem_per_cpu", "mem_per_gpu"), requested_memory),
}
_COUNTS = (
    *("ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "ntasks_per_gpu"),
    *("sockets_per_node", "cores_per_socket", "threads_per_core", "ntasks_per_socket", "ntasks_per_core"),
)
