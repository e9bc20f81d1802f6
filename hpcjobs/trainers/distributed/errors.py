"""Errors of torch, NCCL and MPI translated for the user, reported by one rank."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hpcjobs import gpu_errors
from hpcjobs.runtime import signals
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import (
    AlreadyReported,
    BadConfiguration,
    GpuFault,
    OutOfMemory,
    PeerLost,
    StorageFault,
    TrainerError,
)
from hpcjobs.runtime.streams import print_error

PEER_SPEAKS_S = 3.0  # a rank whose peer went away waits so long for the peer's own words
CLAIM_LINGERS_S = 1.0
LOST = ("gloo/transport", "Horovod has been shut down")
"""Beside what `gpu_errors` knows."""
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO)
FULL = ("DefaultCPUAllocator", "not enough memory", "out of memory")
END_OF_FACTS = re.compile(
    r"Exception raised from|CUDA kernel errors might be|HIP kernel errors might be|For debugging consider|"
    r"Search for .(?:cuda|hip)Error|Compile with .?TORCH_USE|If reserved but unallocated|"
    r"If reserved memory is|See documentation for"
)
"""Where torch's general advice, or its C++ stack, begins."""


def translate_error(error: Exception, env: DistEnv) -> TrainerError | None:
    """What the user can act on; None for what must be a bug."""
    if isinstance(error, TrainerError):
        return error
    if isinstance(error, OSError) and error.errno in STORAGE:
        return StorageFault(f"rank {env.rank} can't write: {error}", hint="free space or quota, or mount it again")
    text = str(error)
    kind = gpu_errors.FULL if isinstance(error, torch.OutOfMemoryError) else gpu_errors.classify(text)
    if kind is not None and isinstance(error, RuntimeError | ImportError):
        return translate_gpu_error(kind, extract_facts(text), env)
    if isinstance(error, MemoryError) or any(sign in text for sign in FULL):
        return OutOfMemory(
            f"rank {env.rank} ran out of memory",
            hint="a smaller --batch-size with a larger --accumulate keeps the result, or ask for more --mem",
        )
    if isinstance(error, dist.DistBackendError):  # NCCL's, of no known kind: its own text and its traceback
        return None
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in LOST)):
        return translate_gpu_error(gpu_errors.LOST, extract_facts(text), env)
    return None


def translate_gpu_error(kind: gpu_errors.GpuError, facts: str, env: DistEnv) -> TrainerError:
    """The error of this kind, with the library's own text; the host of a GPU with a fault becomes a suspect."""
    where = f"rank {env.rank} on {socket.gethostname()}"
    if kind.effect == gpu_errors.FAULT:
        try:
            signals.suspect(os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        except OSError as error:  # a run folder that is away must not hide the fault
            print_error(f"warning: the suspects cannot be written: {error}")
        return GpuFault(f"{where}: {facts}", hint="another node; tell the administrators")
    if kind.effect == gpu_errors.OUT_OF_MEMORY:
        return OutOfMemory(f"{where} ran out of GPU memory: {facts}", hint=kind.fix)
    if kind.effect == gpu_errors.CONFIGURATION:
        return BadConfiguration(f"{where}: {facts}", hint=f"{kind.text}: {kind.fix}")
    return PeerLost(
        f"rank {env.rank} lost another rank in the middle of the run: {facts}",
        hint="the log of the rank that ended first says why; killed without a word often means memory",
    )


def extract_facts(text: str) -> str:
    """The text of an error in one line, without the general advice and the C++ stack that torch appends."""
    end = END_OF_FACTS.search(text)
    return " ".join((text if end is None else text[: end.start()]).split()).rstrip(" .")


def elect_reporter(error: TrainerError, env: DistEnv, store: Store) -> TrainerError:
    """The error if this rank is to tell it, else AlreadyReported. The first to claim tells."""
    if isinstance(error, AlreadyReported) or error.elected:
        return error
    try:
        if isinstance(error, PeerLost):
            _await_claim(store)
        if store.add("error/claims", 1) > 1:
            _await_claim(store)
            return AlreadyReported(*json.loads(store.get("error")))
        store.set("error", json.dumps([int(error.code), str(error)]))
    except dist.DistError:  # the store went with rank 0, and rank 1 is the first that can tell
        if env.rank > 1:
            return AlreadyReported(error.code, str(error))
    error.elected = True
    if env.rank == 0 and env.world_size > 1:
        print_error(f"error: {error}")
        time.sleep(CLAIM_LINGERS_S)  # the store ends with this process: let the others read the claim
        return AlreadyReported(error.code, str(error))
    return error


def _await_claim(store: Store) -> None:
    try:
        store.wait(["error"], timedelta(seconds=PEER_SPEAKS_S))
    except dist.DistNetworkError:
        raise
    except dist.DistStoreError:
        return
