"""What hpcjobs knows of a cloud: one `CloudProvider`, in a module of its own such as `gcp`.

Names, prices and limits change at the provider's own pace. Terraform files are in ``templates/cloud/NAME``, the schemas
that they are checked against in ``schemas/NAME.json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpcjobs.cloud.hcl import Value
from hpcjobs.units import memory_bytes

if TYPE_CHECKING:
    from hpcjobs.cloud.cluster import Cluster
    from hpcjobs.cloud.section import Cloud

Kind = Literal["vms", "toolkit", "soperator"]
Level = Literal["error", "warning", "note"]


class Machine(NamedTuple):
    """A machine type: CPUs as the guest sees them, memory in GiB, and its GPUs."""

    provider: str
    name: str
    cpus: int
    mem_gib: float
    gpu_model: str | None = None
    gpus: int = 0
    """GPUs it always has; those of ``attachable`` come on top."""
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
    """What can be rendered for it."""
    machines: Sequence[Machine]
    """The machine types that it sells, under its own names. To use one that is missing, add its line."""
    check: Callable[[Cloud], None]
    """Raises ValueError where the section asks for what this cloud does not have."""
    find_refused_name: Callable[[str], str | None]
    """Why it refuses a name that it makes of the site's name; None: it does not."""
    terraform_values: Callable[[Cluster], dict[str, Value]]
    """Values of its own Terraform variables, besides those of every cloud."""
    describe_security: Callable[[Cloud], Iterator[tuple[Level, str, str]]]
    """Level, subject and text of each fact about identity and start of the machines."""
    credentials: str
    """Which variables or commands give Terraform its credentials."""
    find_arguments: Callable[[Mapping[str, str]], list[str]]
    """Arguments of Terraform that follow from the environment."""
    install_driver: str | None = None
    """Shell commands that build NVIDIA's driver on an image without one."""


def gib(size: str) -> int:
    """Whole GiB, rounded up."""
    return -(-memory_bytes(size) // (1 << 30))
