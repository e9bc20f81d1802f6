"""Reads utilisation, memory, power and temperature of some GPUs by NVML, where GPUs and NVML exist."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

try:
    import pynvml
except ImportError:
    pynvml = None


class Gpus:
    """`missing` says why there is nothing to read."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.missing: str | None = None
        self._handles: list[Any] = []
        if not uuids:
            self.missing = "the ranks use none"
        elif pynvml is None:
            self.missing = "the package nvidia-ml-py is not installed"
        else:
            self._open(sorted(set(uuids)))

    def _open(self, uuids: Sequence[str]) -> None:
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except pynvml.NVMLError as error:
            self.missing = f"NVML says: {error}"

    def read(self) -> dict[str, float | None]:
        """Read mean utilisation and hottest temperature of all GPUs, and the sums of memory and power."""
        handles = self._handles
        percents = _each(handles, lambda one: pynvml.nvmlDeviceGetUtilizationRates(one).gpu)
        memory = _each(handles, lambda one: pynvml.nvmlDeviceGetMemoryInfo(one).used)
        watts = _each(handles, lambda one: pynvml.nvmlDeviceGetPowerUsage(one) / 1e3)
        degrees = _each(handles, lambda one: pynvml.nvmlDeviceGetTemperature(one, pynvml.NVML_TEMPERATURE_GPU))
        return {
            "gpu_percent": sum(percents) / len(percents) if percents else None,
            "gpu_memory_bytes": sum(memory) if memory else None,
            "gpu_power_w": sum(watts) if watts else None,
            "gpu_temperature_c": max(degrees) if degrees else None,
        }


def _each(handles: Sequence[Any], ask: Callable[[Any], float]) -> list[float]:
    """What a device does not tell (a part of a GPU has no utilisation of its own) is left out."""
    answers = []
    for handle in handles:
        with suppress(pynvml.NVMLError):
            answers.append(float(ask(handle)))
    return answers
