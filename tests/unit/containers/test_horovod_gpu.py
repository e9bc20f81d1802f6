"""Whether Horovod is built with NCCL: where CUDA's torch, nvcc and NCCL are there, and else a reason."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcjobs.data import data_folder


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("horovod_gpu", data_folder("containers") / "horovod_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["horovod_gpu"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def complete(gpu: ModuleType) -> Any:
    return gpu.Machine(
        torch_cuda="12.8",
        has_gpu=True,
        nvcc="/opt/cuda/bin/nvcc",
        nvcc_version="12.6",
        nccl_include="/opt/nccl/include",
        nccl_lib="/opt/nccl/lib",
        nccl_version="2.26.2",
    )


def test_with_all_of_it_the_build_has_nccl_and_a_wheel_of_its_own(gpu: ModuleType, complete: Any) -> None:
    key, *variables = gpu.choose(complete)
    assert key == "cuda12.6-nccl2.26.2"
    assert "HOROVOD_GPU_OPERATIONS=NCCL" in variables
    assert "HOROVOD_CUDA_HOME=/opt/cuda" in variables
    assert "HOROVOD_NCCL_LIB=/opt/nccl/lib" in variables


@pytest.mark.parametrize(
    ("lack", "reason"),
    [
        ({"nvcc": None}, "there is no nvcc in PATH or CUDA_HOME"),
        ({"nvcc_version": "11.8"}, "/opt/cuda/bin/nvcc is of CUDA 11.8"),
        ({"nccl_include": None, "nccl_lib": None}, "there is no nccl.h in"),
        ({"nccl_lib": None}, "there is no libnccl.so beside /opt/nccl/include"),
    ],
)
def test_what_is_missing_is_the_reason_on_a_machine_with_a_gpu_and_no_matter_on_one_without(
    gpu: ModuleType, complete: Any, lack: dict[str, None], reason: str
) -> None:
    machine = replace(complete, **lack)
    with pytest.raises(gpu.Refusal, match=f"torch is built for CUDA 12.8, and {reason}.*--cpu builds without GPUs"):
        gpu.choose(machine)
    assert gpu.choose(replace(machine, has_gpu=False)) == []


def test_torch_for_the_cpu_has_horovod_for_the_cpu(gpu: ModuleType, complete: Any) -> None:
    assert gpu.choose(replace(complete, torch_cuda=None)) == []


def test_nccl_is_read_from_its_header_and_its_folder(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("include", "lib"):
        (tmp_path / folder).mkdir()
    header = tmp_path / "include/nccl.h"
    header.write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 7\n#define NCCL_SUFFIX\n")
    monkeypatch.setenv("NCCL_HOME", str(tmp_path))
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    (tmp_path / "lib/libnccl.so.2").touch()
    assert gpu.find_nccl() == (str(tmp_path / "include"), str(tmp_path / "lib"))
    assert gpu.read_nccl_version(header) == "2.27.7"
