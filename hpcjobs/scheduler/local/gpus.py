"""The GPUs that local jobs share out: NVIDIA's counted by device files, AMD's by the topology of their driver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from hpcjobs.processes.tree import MARK

CHOICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Variables with which a user or an enclosing job selects devices; HIP reads both as the same list."""
_ROCR = "ROCR_VISIBLE_DEVICES"
_SIMD_COUNT = re.compile(r"^simd_count ([1-9]\d*)$", re.MULTILINE | re.ASCII)


def visible_gpus(environ: Mapping[str, str], *, count: int | None, root: Path = Path("/")) -> tuple[str, ...]:
    """The names of the GPUs to share out, in the form of CUDA_VISIBLE_DEVICES.

    A user's selection (`CHOICES`) limits and orders them; an enclosing local job's selection is ignored.

    Args:
        count: number of GPUs, numbered from 0, without a look at the machine; None: the machine's GPUs.
    """
    names = list_gpus(environ, root) if count is None else tuple(map(str, range(count)))
    choice = user_choice(environ)
    if choice is None or environ.get(MARK):
        return names
    listed = map(str.strip, choice.partition("=")[2].split(","))
    return tuple(dict.fromkeys(takewhile(lambda name: _names_gpu(name, names), listed)))


def user_choice(environ: Mapping[str, str]) -> str | None:
    """The first variable of `CHOICES` that is set, as `NAME=VALUE`."""
    return next((f"{name}={environ[name]}" for name in CHOICES if name in environ), None)


def list_gpus(environ: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """Numbers of NVIDIA devices, or of AMD devices, which ROCR_VISIBLE_DEVICES renumbers.

    CUDA numbers the devices that are there from 0: the number in a device file's name is another one.
    """
    nvidia = sum(1 for path in root.glob("dev/nvidia[0-9]*") if path.name[6:].isdigit())
    if nvidia:
        return tuple(map(str, range(nvidia)))
    amd = count_amd_gpus(root)
    if environ.get(_ROCR):
        amd = min(amd, len(environ[_ROCR].split(",")))
    return tuple(map(str, range(amd)))


def count_amd_gpus(root: Path) -> int:
    """Nodes of the driver's topology with SIMD units: those without are CPUs. Both dies of an MI250X count."""
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(1 for path in nodes if _SIMD_COUNT.search(path.read_text(encoding="ascii")))


def _names_gpu(name: str, names: tuple[str, ...]) -> bool:
    """As CUDA reads the list: by index or UUID, and the first name that is neither ends it."""
    return name in names or (bool(names) and name.startswith(("GPU-", "MIG-")))


def assign_gpus(gpus: tuple[str, ...]) -> dict[str, str]:
    """The variables that show a job these GPUs alone; AMD's HIP refuses the two to differ."""
    value = ",".join(gpus)
    return dict.fromkeys(CHOICES if "HIP_VISIBLE_DEVICES" in os.environ else CHOICES[:1], value)
