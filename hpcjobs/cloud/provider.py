"""Types that describe a cloud; each cloud is a `CloudProvider` in a module such as `gcp`.

Terraform files are in ``templates/cloud/NAME``, the schemas that they are checked against in ``schemas/NAME.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpcjobs.units import memory_bytes

if TYPE_CHECKING:
    from hpcjobs.cloud.section import Cloud, Cluster


Value = str | int | float | bool | None | Sequence[str] | Mapping[str, str]


def literal(value: Value) -> str:
    """``value`` on one line; text is escaped so that HCL reads it unchanged."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("${", "$${").replace("%{", "%%{")
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{literal(key)} = {literal(item)}" for key, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return f"[{', '.join(literal(item) for item in value)}]"


def assignments(values: Mapping[str, Value]) -> str:
    """One line for each of ``values``, their signs of equality below each other."""
    width = max(len(name) for name in values)
    return "".join(f"{name:<{width}} = {literal(value)}\n" for name, value in values.items())


Kind = Literal["vms", "toolkit", "soperator"]
Level = Literal["error", "warning", "note"]


class Machine(NamedTuple):
    """A machine type: CPUs as the guest sees them, memory in GiB, and its GPUs."""

    name: str
    cpus: int
    mem_gib: float
    gpu_model: str | None = None
    gpus: int = 0
    """GPUs that the machine always has; ``attachable`` GPUs are not counted."""
    attachable: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """GPU model -> counts that may be attached."""
    fabric: bool = False
    """Nodes of it can be joined by InfiniBand."""

    def gpu_counts(self, model: str) -> tuple[int, ...]:
        """How many GPUs of ``model`` a node of this type may have."""
        return (self.gpus,) if model == self.gpu_model else dict(self.attachable).get(model, ())


class CloudProvider(NamedTuple):
    """A cloud that machines are rented from."""

    name: str
    kinds: tuple[Kind, ...]
    """Kinds of folder that can be rendered."""
    machines: Sequence[Machine]
    """The machine types that it sells, by the provider's names. Add a line for a missing one."""
    check: Callable[[Cloud], None]
    """Raises ValueError if the section requests a feature that this provider does not have."""
    find_refused_name: Callable[[str], str | None]
    """Reason why the provider refuses a name made from the site's name, or None."""
    terraform_values: Callable[[Cluster], dict[str, Value]]
    """Values of the provider's Terraform variables, added to the common ones."""
    describe_security: Callable[[Cloud], Iterator[tuple[Level, str, str]]]
    """Level, subject and text of each fact about identity and start of the machines."""
    credentials: str
    """Which variables or commands give Terraform its credentials."""
    find_arguments: Callable[[Mapping[str, str]], list[str]]
    """Arguments of Terraform that follow from the environment."""
    install_driver: str | None = None
    """Shell commands that build NVIDIA's driver on an image without one."""

    def find_machine(self, name: str) -> Machine | None:
        """The machine type of that name, if it sells one; another cloud may use the name too."""
        return next((machine for machine in self.machines if machine.name == name), None)


def gib(size: str) -> int:
    """Whole GiB, rounded up."""
    return -(-memory_bytes(size) // (1 << 30))
