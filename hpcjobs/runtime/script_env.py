"""What `start()` sets in the environment of a script, and what it reads there: run folder, GPUs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import UsageError

_GPU_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def choose_run_dir(given: str | os.PathLike[str] | None, name: str, env: DistEnv) -> Path:
    """The job's run folder; by hand `given`, else runs/NAME, which rank 0 says."""
    of_job = os.environ.get("HPCJOBS_RUN_DIR")
    if of_job and given is not None and Path(of_job).resolve() != Path(given).resolve():
        raise UsageError(f"run_dir={os.fspath(given)!r}, but the job's run folder is {of_job}", hint="leave it out")
    folder = Path(of_job or given or f"runs/{name}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not of_job and given is None and env.rank == 0:
        print(f"not started by hpcjobs: files go to {folder}; start(run_dir=...) chooses another folder", flush=True)
    return folder


def export_ranks(env: DistEnv) -> None:
    """Set the variables that `torch.distributed.init_process_group` reads, where the launcher has not."""
    values = {
        "RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "LOCAL_RANK": env.local_rank,
        "LOCAL_WORLD_SIZE": env.local_world_size,
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": env.master_port,
    }
    for name, value in values.items():
        if value is not None and env.launcher != "none":
            os.environ.setdefault(name, str(value))


def count_gpus() -> int:
    """GPUs that this process sees: by the variable that lists them, by torch if it is loaded, by NVIDIA's devices."""
    for name in _GPU_LISTS:
        if (listed := os.environ.get(name)) is not None:
            devices = [item.strip() for item in listed.split(",") if item.strip() not in ("", "-1", "NoDevFiles")]
            return 1 if devices and devices[0].startswith("MIG-") else len(devices)  # CUDA shows one MIG slice
    torch = sys.modules.get("torch")
    if torch is not None:
        count: int = torch.cuda.device_count()
        return count
    return len([item for item in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", item)])
