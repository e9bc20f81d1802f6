"""The table of machine types: what each provider sells, under the provider's own names.

Figures are the providers' published ones (GCP: "machine families" and "GPU machine types"; Nebius: "platforms and
presets"). To use a machine that is missing, add its line here.
"""

from __future__ import annotations

from typing import NamedTuple


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


GCP_ACCELERATORS = {
    "t4": "nvidia-tesla-t4",
    "v100": "nvidia-tesla-v100",
    "p100": "nvidia-tesla-p100",
    "l4": "nvidia-l4",
    "a100": "nvidia-tesla-a100",
    "a100-80gb": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
}
"""Our name of a GPU model -> GCP's accelerator type."""


def _gcp_general() -> list[Machine]:
    families = (("e2-standard", 4.0, (2, 4, 8, 16, 32)), ("n2-standard", 4.0, (2, 4, 8, 16, 32, 48, 64, 80)))
    return [Machine("gcp", f"{name}-{n}", n, n * gib) for name, gib, counts in families for n in counts]


def _gcp_n1() -> list[Machine]:
    """N1: the family to which GPUs can be attached; larger ones need more of them."""
    small = (("t4", (1, 2, 4)), ("p100", (1, 2, 4)), ("v100", (1, 2, 4, 8)))
    gpus = dict.fromkeys((1, 2, 4, 8), small) | {
        16: (("t4", (1, 2, 4)), ("p100", (1, 2, 4)), ("v100", (2, 4, 8))),
        32: (("t4", (2, 4)), ("p100", (2, 4)), ("v100", (4, 8))),
    }
    return [Machine("gcp", f"n1-standard-{n}", n, n * 3.75, attachable=models) for n, models in gpus.items()]


def _gcp_accelerated() -> list[Machine]:
    g2 = ((4, 16, 1), (8, 32, 1), (12, 48, 1), (16, 64, 1), (24, 96, 2), (32, 128, 1), (48, 192, 4), (96, 384, 8))
    a2 = (("1g", 12, 85, 1), ("2g", 24, 170, 2), ("4g", 48, 340, 4), ("8g", 96, 680, 8))
    return [
        *(Machine("gcp", f"g2-standard-{n}", n, gib, "l4", gpus) for n, gib, gpus in g2),
        *(Machine("gcp", f"a2-highgpu-{name}", n, gib, "a100", gpus) for name, n, gib, gpus in a2),
        *(Machine("gcp", f"a2-ultragpu-{name}", n, 2 * gib, "a100-80gb", gpus) for name, n, gib, gpus in a2),
        Machine("gcp", "a3-highgpu-8g", 208, 1872, "h100", 8),
    ]


def _nebius() -> list[Machine]:
    cpu = [
        Machine("nebius", f"{platform}/{n}vcpu-{4 * n}gb", n, 4 * n)
        for platform in ("cpu-d3", "cpu-e2")
        for n in (2, 4, 8, 16, 32, 48, 64, 80)
        if (platform, n) != ("cpu-d3", 2)
    ]
    gpu = [
        Machine("nebius", "gpu-l40s-a/1gpu-8vcpu-32gb", 8, 32, "l40s", 1),
        Machine("nebius", "gpu-h100-sxm/1gpu-16vcpu-200gb", 16, 200, "h100", 1),
        Machine("nebius", "gpu-h100-sxm/8gpu-128vcpu-1600gb", 128, 1600, "h100", 8, fabric=True),
        Machine("nebius", "gpu-h200-sxm/1gpu-16vcpu-200gb", 16, 200, "h200", 1),
        Machine("nebius", "gpu-h200-sxm/8gpu-128vcpu-1600gb", 128, 1600, "h200", 8, fabric=True),
        Machine("nebius", "gpu-b200-sxm/8gpu-160vcpu-1792gb", 160, 1792, "b200", 8, fabric=True),
    ]
    return cpu + gpu


MACHINES = {m.name: m for m in [*_gcp_general(), *_gcp_n1(), *_gcp_accelerated(), *_nebius()]}
