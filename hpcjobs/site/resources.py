"""What a job asks Slurm for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from hpcjobs.site.checks import check_count, check_line
from hpcjobs.site.frozen import Frozen
from hpcjobs.units import requested_time, slurm_memory

_NODES = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?\Z", re.ASCII)
_GPUS = re.compile(r"(?:(?P<model>[A-Za-z0-9][\w.-]*):)?(?P<count>\d{1,8})\Z", re.ASCII)
_GPU_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::(?P<model>[A-Za-z][\w.-]*))?(?:[:=](?P<count>\d{1,8}))?(?:\(.*\))?\Z", re.ASCII
)


GPU_FIELDS = ("gpus", "gpus_per_node", "gpus_per_task")


def node_range(nodes: int | str) -> tuple[int, int]:
    """The fewest and the most nodes of ``4`` or ``2-4``.

    Raises:
        ValueError: neither of these.
    """
    match = _NODES.match(str(nodes))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if match is not None and match[2] is None and least < 1:
        raise ValueError(f"nodes must be positive, not {nodes}")
    if not 1 <= least <= most:
        raise ValueError(f"nodes {nodes!r} is not understood; say 4, or 2-4 for a range")
    return least, most


def gpus_and_model(gpus: int | str, field: str = "gpus_per_node") -> tuple[int, str | None]:
    """The count, and the model if one is named, of ``4`` or ``v100:4``.

    Raises:
        ValueError: neither of these.
    """
    match = _GPUS.match(str(gpus))
    if match is None:
        raise ValueError(f"{field} {gpus!r} is not understood; say 4, or v100:4 for a model")
    return int(match["count"]), match["model"]


def gpus_in_gres(gres: str) -> tuple[list[str], list[str]]:
    """The GPU requests of a ``--gres`` value as ``gpus_per_node`` has them, and what else it asks for."""
    gpus: list[str] = []
    others: list[str] = []
    for part in re.split(r",(?![^()]*\))", gres):
        match = _GPU_GRES.match(part)
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
    nodes: int | str | None | UnsetType = UNSET
    """Or a range: ``2-4``."""
    ntasks: int | None | UnsetType = UNSET
    """Tasks over all nodes."""
    ntasks_per_node: int | None | UnsetType = UNSET
    cpus_per_task: int | None | UnsetType = UNSET
    cpus_per_gpu: int | None | UnsetType = UNSET
    gpus: int | str | None | UnsetType = UNSET
    """GPUs over all nodes."""
    gpus_per_node: int | str | None | UnsetType = UNSET
    """Or with a model: ``v100:4``; so ``gpus`` and ``gpus_per_task``."""
    gpus_per_task: int | str | None | UnsetType = UNSET
    ntasks_per_gpu: int | None | UnsetType = UNSET
    mem: str | None | UnsetType = UNSET
    mem_per_cpu: str | None | UnsetType = UNSET
    mem_per_gpu: str | None | UnsetType = UNSET
    time: str | None | UnsetType = UNSET
    time_min: str | None | UnsetType = UNSET
    account: str | None | UnsetType = UNSET
    qos: str | None | UnsetType = UNSET
    constraint: str | None | UnsetType = UNSET
    exclusive: bool | str | None | UnsetType = UNSET
    array: str | None | UnsetType = UNSET
    dependency: str | None | UnsetType = UNSET
    begin: str | None | UnsetType = UNSET
    deadline: str | None | UnsetType = UNSET
    nodelist: str | None | UnsetType = UNSET
    exclude: str | None | UnsetType = UNSET
    reservation: str | None | UnsetType = UNSET
    licenses: str | None | UnsetType = UNSET
    gres: str | None | UnsetType = UNSET
    tmp: str | None | UnsetType = UNSET
    clusters: str | None | UnsetType = UNSET
    comment: str | None | UnsetType = UNSET
    wckey: str | None | UnsetType = UNSET
    mail_type: str | None | UnsetType = UNSET
    mail_user: str | None | UnsetType = UNSET
    nice: int | None | UnsetType = UNSET
    priority: int | None | UnsetType = UNSET
    hold: bool | None | UnsetType = UNSET
    requeue: bool | None | UnsetType = UNSET
    open_mode: Literal["append", "truncate"] | None | UnsetType = UNSET
    signal: str | None | UnsetType = UNSET
    switches: str | None | UnsetType = UNSET
    contiguous: bool | None | UnsetType = UNSET
    oversubscribe: bool | None | UnsetType = UNSET
    overcommit: bool | None | UnsetType = UNSET
    spread_job: bool | None | UnsetType = UNSET
    core_spec: int | None | UnsetType = UNSET
    sockets_per_node: int | None | UnsetType = UNSET
    cores_per_socket: int | None | UnsetType = UNSET
    threads_per_core: int | None | UnsetType = UNSET
    ntasks_per_socket: int | None | UnsetType = UNSET
    ntasks_per_core: int | None | UnsetType = UNSET
    hint: str | None | UnsetType = UNSET
    distribution: str | None | UnsetType = UNSET
    cpu_freq: str | None | UnsetType = UNSET
    gpu_freq: str | None | UnsetType = UNSET
    network: str | None | UnsetType = UNSET
    power: str | None | UnsetType = UNSET
    prefer: str | None | UnsetType = UNSET
    no_kill: bool | None | UnsetType = UNSET
    profile: str | None | UnsetType = UNSET
    acctg_freq: str | None | UnsetType = UNSET
    bb: str | None | UnsetType = UNSET
    bbf: str | None | UnsetType = UNSET

    def __post_init__(self) -> None:
        for field, normalize in _SPELLING.items():
            value = getattr(self, field)
            if isinstance(value, str):
                try:
                    self._set(field, normalize(value))
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
            raise ValueError(f"gres {gres!r}{also}: GPUs are asked for twice; say gpus_per_node alone (4, or v100:4)")
        self._set("gpus_per_node", gpus[0])
        self._set("gres", ",".join(others) if others else UNSET)

    def _set(self, field: str, value: object) -> None:
        msgspec.structs.force_setattr(self, field, value)


_SPELLING: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(("time", "time_min"), requested_time),
    **dict.fromkeys(("mem", "mem_per_cpu", "mem_per_gpu"), slurm_memory),
}
_COUNTS = (
    *("ntasks", "ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "ntasks_per_gpu"),
    *("sockets_per_node", "cores_per_socket", "threads_per_core"),
)
