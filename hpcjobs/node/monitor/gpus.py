"""The job's GPUs by NVIDIA's management library, which comes with the driver; no package is needed."""

import ctypes
from typing import Any, Callable, Dict, List, Mapping, Optional


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def load_library() -> Optional[Any]:
    """None: this node has no NVIDIA driver."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


_OF_OTHER_VENDORS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_NONE_HELD = ("", "-1", "NoDevFiles")
"""What Slurm and users write for "no GPU"."""


class GpuReader:
    """Those that the job holds: of CUDA_VISIBLE_DEVICES, else all that the node lets it see."""

    are_held: bool
    """Also those that cannot be read: of another vendor, or without a driver's library."""

    def __init__(self, environ: Mapping[str, str], library: Optional[Any]) -> None:
        self._library = library
        self._handles: List[ctypes.c_void_p] = []
        held = environ.get("CUDA_VISIBLE_DEVICES", environ.get("SLURM_JOB_GPUS"))
        others = [environ[name] for name in _OF_OTHER_VENDORS if name in environ]
        self.are_held = any(names not in _NONE_HELD for names in (others if held is None else [held, *others]))
        if library is None or held in _NONE_HELD or library.nvmlInit_v2() != 0:
            return
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for name in range(count.value) if held is None else held.split(","):
            handle = ctypes.c_void_p()
            if isinstance(name, str) and not name.isdigit():
                code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            else:
                code = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
            if code == 0:
                self._handles.append(handle)
        self.are_held = self.are_held or bool(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def read(self) -> Dict[str, Optional[float]]:
        """Read mean utilisation and hottest temperature of all GPUs, sums of memory and power; None: not measured."""
        percents = self._each(_Utilization, "nvmlDeviceGetUtilizationRates", lambda value: value.gpu)
        used = self._each(_Memory, "nvmlDeviceGetMemoryInfo", lambda value: value.used)
        watts = self._each(ctypes.c_uint, "nvmlDeviceGetPowerUsage", lambda value: value.value / 1e3)
        degrees = self._each(ctypes.c_uint, "nvmlDeviceGetTemperature", lambda value: value.value, 0)
        return {
            "gpu_percent": sum(percents) / len(percents) if percents else None,
            "gpu_memory_bytes": sum(used) if used else None,
            "gpu_power_w": sum(watts) if watts else None,
            "gpu_temperature_c": max(degrees) if degrees else None,
        }

    def _each(self, kind: Any, function: str, take: Callable[[Any], float], *arguments: int) -> List[float]:
        """What a device does not tell (a part of a GPU has no utilisation of its own) is left out."""
        answers = []
        for handle in self._handles:
            value = kind()
            if getattr(self._library, function)(handle, *arguments, ctypes.byref(value)) == 0:
                answers.append(float(take(value)))
        return answers
