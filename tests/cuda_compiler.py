"""CUDA's compiler, which needs no GPU: this machine's own, else that of the Python environment."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

_IN_ENVIRONMENT = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
NVCC = shutil.which("nvcc") or next(map(str, _IN_ENVIRONMENT), None)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc here")
