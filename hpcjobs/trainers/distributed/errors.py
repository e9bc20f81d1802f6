"""Errors from below in the user's words, told by one rank."""

from __future__ import annotations

import errno
import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import AlreadyReported, OutOfMemory, PeerLost, StorageFault, TrainerError
from hpcjobs.runtime.streams import print_error

PEER_SPEAKS_S = 3.0  # a rank whose peer went away waits so long for the peer's own words
CLAIM_LINGERS_S = 1.0
LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "NCCL"),
    "Horovod has been shut down",
)
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.EIO)
FULL = ("DefaultCPUAllocator", "not enough memory", "out of memory")


def translate_error(error: Exception, env: DistEnv) -> TrainerError | None:
    """What the user can act on; None for what must be a bug."""
    if isinstance(error, TrainerError):
        return error
    if isinstance(error, OSError) and error.errno in STORAGE:
        return StorageFault(f"rank {env.rank} can't write: {error}", hint="free space or quota, or mount it again")
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in text for word in FULL):
        return OutOfMemory(
            f"rank {env.rank} ran out of memory",
            hint="a smaller --batch-size with a larger --accumulate keeps the result, or ask for more --mem",
        )
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in text for w in LOST)):
        return PeerLost(
            f"rank {env.rank} lost another rank in the middle of the run",
            hint="the log of the rank that ended first says why; killed without a word often means memory",
        )
    return None


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
