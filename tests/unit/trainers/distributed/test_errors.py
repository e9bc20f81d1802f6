"""What a trainer makes of errors from below: its exit code, the library's own text, and what to change."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_error_texts import GpuErrorText, read_texts

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import BadConfiguration, ExitCode, GpuFault, TrainerError, UsageError
from hpcjobs.trainers import distributed
from hpcjobs.trainers.distributed import choose_device, requests_gpus, translate_error

RANK_3 = DistEnv(3, 1, 4, 2, 1, "n1", 29500, "torchrun")
CODES = {
    "fault": ExitCode.GPU_FAULT,
    "out of memory": ExitCode.OUT_OF_MEMORY,
    "configuration": ExitCode.CONFIGURATION,
    "rank lost": ExitCode.PEER_LOST,
}
CLASSES: dict[str, type[Exception]] = {
    "RuntimeError": RuntimeError,
    "ImportError": ImportError,
    "AcceleratorError": getattr(torch, "AcceleratorError", RuntimeError),  # from torch 2.8 on
    "OutOfMemoryError": torch.OutOfMemoryError,
    "DistBackendError": dist.DistBackendError,
}


@pytest.mark.parametrize("error", read_texts(), ids=lambda error: f"{error.effect}-{error.message[-30:]}")
def test_an_error_of_cuda_or_nccl_has_its_exit_code_and_keeps_its_own_text(
    error: GpuErrorText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_CONTROL_DIR", str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    ours = translate_error(CLASSES[error.exception](error.message), RANK_3)
    suspects = tmp_path / "suspects"
    assert (suspects.read_text().split() if suspects.exists() else []) == (["n2"] if error.effect == "fault" else [])
    if error.effect == "error":
        assert ours is None, "a bug, or unknown: its traceback"
        return
    assert ours is not None
    assert ours.code == CODES[error.effect]
    last = error.message.split("Last error:")[-1]
    for advice in ("CUDA kernel errors", " If reserved", "Search for"):
        last = last.split(advice)[0]
    assert " ".join(last.split()).rstrip(".") in str(ours)
    assert "CUDA_LAUNCH_BLOCKING" not in str(ours)
    assert "https://" not in str(ours)


def test_a_gpu_without_memory_shows_torchs_figures_and_what_to_change_and_never_the_nodes_memory() -> None:
    text = next(error.message for error in read_texts() if error.exception == "OutOfMemoryError")
    ours = str(translate_error(torch.OutOfMemoryError(text), RANK_3))
    for arguments in (
        "2.50 GiB",
        "39.38 GiB",
        "--batch-size",
        "--accumulate",
        "--precision",
        "--activation-checkpointing",
    ):
        assert arguments in ours
    assert "--mem" not in ours


def test_a_host_without_memory_is_told_to_request_more() -> None:
    assert "--mem" in str(translate_error(MemoryError(), RANK_3))


def test_a_job_that_requested_gpus_and_sees_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadConfiguration, match=r"SLURM_GPUS_ON_NODE=2.*sees none.*--device cpu"):
        choose_device("auto", RANK_3, {"SLURM_GPUS_ON_NODE": "2"})
    assert choose_device("cpu", RANK_3, {"SLURM_GPUS_ON_NODE": "2"}).type == "cpu"
    assert choose_device("auto", RANK_3, {}).type == "cpu"
    with pytest.raises(UsageError, match="sees no device"):
        choose_device("cuda", RANK_3, {})


@pytest.mark.parametrize(
    ("reason", "error", "settings"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", BadConfiguration, "found version 11040"),
        ("Error 802: system not yet initialized", GpuFault, "802: system not yet initialized"),
        (
            "CUDA driver initialization failed, you might not have a CUDA gpu.",
            BadConfiguration,
            "initialization failed",
        ),
    ],
)
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_job_whose_gpus_are_there_and_do_not_start_never_trains_on_the_cpu(
    name: str, reason: str, error: type[TrainerError], settings: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NVML counts the GPUs, and CUDA does not start on them."""

    def fail() -> None:
        raise RuntimeError(reason)

    monkeypatch.setenv("HPCJOBS_CONTROL_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(error, match=settings):
        choose_device(name, RANK_3, {"SLURM_GPUS_ON_NODE": "4"})


@pytest.mark.parametrize(("local_rank", "device"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_ranks_that_slurm_binds_to_the_gpus_of_their_socket_take_one_of_these(local_rank: int, device: int) -> None:
    """`--gpu-bind=closest` on two sockets: of the node's four GPUs each rank sees two."""
    env = DistEnv(local_rank, local_rank, 4, 4, 0, "n1", 29500, "srun")
    assert env.device_index(2, on_node=4) == device
    with pytest.raises(BadConfiguration, match=r"4 ranks.*2 GPUs"):
        env.device_index(2, on_node=2)


@pytest.mark.parametrize(
    ("environ", "requested"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "4"}, "SLURM_GPUS_ON_NODE=4"),
        ({"SLURM_GPUS_ON_NODE": "0"}, None),
        ({"SLURM_JOB_GPUS": "0,1"}, "SLURM_JOB_GPUS=0,1"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),  # of the user's shell: a machine may have no GPU all the same
        ({"CUDA_VISIBLE_DEVICES": "0", "HPCJOBS_SCHEDULER": "local"}, "CUDA_VISIBLE_DEVICES=0"),
        ({"CUDA_VISIBLE_DEVICES": "", "HPCJOBS_SCHEDULER": "local"}, None),
    ],
)
def test_what_the_job_requested_is_read_from_its_scheduler(environ: dict[str, str], requested: str | None) -> None:
    assert requests_gpus(environ) == requested


@pytest.mark.parametrize(("visible", "local_ranks", "device"), [(1, 4, 0), (4, 4, 1), (8, 4, 1)])
def test_a_rank_uses_its_own_gpu_or_the_only_one_that_it_sees(visible: int, local_ranks: int, device: int) -> None:
    assert DistEnv(1, 1, 4, local_ranks, 0, "n1", 29500, "srun").device_index(visible) == device


@pytest.mark.parametrize(("visible", "local_ranks"), [(2, 4), (3, 4)])
def test_more_ranks_on_a_node_than_gpus_are_refused(visible: int, local_ranks: int) -> None:
    with pytest.raises(BadConfiguration, match=f"{local_ranks} ranks.*{visible} GPUs.*--ntasks-per-node"):
        DistEnv(1, 1, 4, local_ranks, 0, "n1", 29500, "srun").device_index(visible)


@pytest.mark.parametrize(
    ("device", "backends", "bound"), [("cpu", "gloo", False), ("cuda:1", "cpu:gloo,cuda:nccl", True)]
)
def test_the_process_group_is_formed_with_its_device_and_an_explicit_timeout(
    device: str, backends: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def record(backend: Sequence[str], **options: object) -> None:
        given.update(options, backend=backend)

    monkeypatch.setattr(dist, "init_process_group", record)
    distributed.init_process_group(torch.device(device), RANK_3, dist.HashStore())
    assert given["backend"] == backends
    assert given["device_id"] == (torch.device(device) if bound else None)
    assert given["timeout"] == distributed.COLLECTIVE_TIMEOUT["nccl" if bound else "gloo"]
    distributed.init_process_group(torch.device(device), RANK_3, dist.HashStore(), stall_after_s=7200)
    assert given["timeout"] == timedelta(hours=4), "the watchdog's verdict comes first"
