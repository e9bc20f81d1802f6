"""What `start()` sets in the environment of a script, and what it reads there: rank, run folder, GPUs."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from hpcjobs.runtime.dist import DistEnv, gpus_on_node
from hpcjobs.runtime.exits import StorageFault, UsageError

_GPU_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def choose_run_dir(given: str | os.PathLike[str] | None, name: str, env: DistEnv) -> Path:
    """The job's run folder; by hand `given`, else runs/NAME, which rank 0 says."""
    of_job = os.environ.get("HPCJOBS_RUN_DIR")
    if of_job and given is not None and Path(of_job).resolve() != Path(given).resolve():
        raise UsageError(f"run_dir={os.fspath(given)!r}, but the job's run folder is {of_job}", hint="leave it out")
    folder = Path(of_job or given or f"runs/{name}").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFault(
            f"the run folder {folder} can't be made: {error.strerror}", hint="start(run_dir=...) chooses another folder"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageFault(f"nothing can be written into the run folder {folder}", hint="is it another user's?")
    if not of_job and given is None and env.rank == 0:
        print(f"not started by hpcjobs: files go to {folder}; start(run_dir=...) chooses another folder", flush=True)
    return folder


class ScriptRank:
    """The place of this process in its job, by `env`."""

    def __init__(self, env: DistEnv) -> None:
        self.env = env

    @property
    def rank(self) -> int:
        """The number of this process among all of the job, from 0."""
        return self.env.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.env.world_size

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its host, from 0."""
        return self.env.local_rank

    @property
    def device_index(self) -> int | None:
        """The GPU of this rank among those that it sees; None: it sees none.

        Raises:
            BadConfiguration: ranks would share GPUs.
        """
        visible = count_gpus()
        return self.env.device_index(visible, on_node=gpus_on_node(os.environ)) if visible else None

    @property
    def device(self) -> str:
        """The same as torch spells it: ``cuda:1``, or ``cpu``."""
        index = self.device_index
        return "cpu" if index is None else f"cuda:{index}"

    def print(self, text: str) -> None:
        """A line on standard output, from rank 0."""
        if self.env.rank == 0:
            print(text, flush=True)


def export_ranks(env: DistEnv) -> None:
    """Set the variables that `torch.distributed.init_process_group` reads, where the launcher has not.

    Without a launcher LOCAL_RANK stays unset: libraries take it as the sign that one has started this process.
    """
    values = {
        "RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "MASTER_ADDR": env.master_addr,
        "MASTER_PORT": _find_free_port() if env.master_port is None else env.master_port,
    }
    if env.launcher != "none":
        values |= {"LOCAL_RANK": env.local_rank, "LOCAL_WORLD_SIZE": env.local_world_size}
    for name, value in values.items():
        os.environ.setdefault(name, str(value))


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


def refuse_less_than_one(**arguments: Any) -> None:
    """Raises UsageError for an argument of `start()` that is neither None nor a whole number from 1 on."""
    for name, value in arguments.items():
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"start(): {name}={value!r}, expected a whole number from 1 on")
