"""Errors of CUDA, ROCm and NCCL by their texts: what each one means and what to change.

Three readers share them: trainers, which choose their exit code by them; the process on the node that decides about
further attempts; and `hpcjobs why`. Standard library of Python 3.6.
"""

import re
from typing import NamedTuple, Optional, Tuple

OUT_OF_MEMORY, FAULT, CONFIGURATION, RANK_LOST = "out of memory", "fault", "configuration", "rank lost"
"""What follows from an error: a smaller step; another node; another job; another attempt."""


class GpuError(NamedTuple):
    """One kind of error."""

    cause: str
    """The name that `hpcjobs why` gives it."""
    effect: str
    pattern: str
    text: str
    fix: str = ""


BROKEN = GpuError(
    "gpu-broken",
    FAULT,
    r"(?i)uncorrectable (?:NVLink |ECC )+error|ECC_UNCORRECTABLE|cudaErrorECC|double[- ]bit ECC|fallen off the bus"
    r"|NVRM: Xid|CUDA_ERROR_HARDWARE|unspecified launch failure|hardware stack error|nvlink error"
    r"|Unable to determine the device handle for GPU|hipErrorECCNotCorrectable",
    "A GPU of the node has a hardware fault",
)
FULL = GpuError(
    "gpu-out-of-memory",
    OUT_OF_MEMORY,
    r"(?i)(?:CUDA|HIP) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory|HIP error: out of memory"
    r"|(?:cuda|hip) failure (?:\d+ )?'out of memory'|(?:cuda|hip)ErrorMemoryAllocation",
    "The GPU has not enough memory for the model and its batch",
    "a smaller --batch-size with a larger --accumulate gives the same step, --precision bf16 needs less, and so does "
    "--activation-checkpointing, or the fsdp trainer on more GPUs",
)
SHARED = GpuError(
    "gpu-shared",
    CONFIGURATION,
    r"Duplicate GPU detected",
    "Two ranks use the same GPU",
    "request as many GPUs as ranks per node; a program uses LOCAL_RANK modulo torch.cuda.device_count()",
)
NO_INTERFACE = GpuError(
    "interface-missing",
    CONFIGURATION,
    r"(?i)no socket interface found|no NCCL_SOCKET_IFNAME interface found|NCCL_SOCKET_IFNAME.*(?:not found|no match)"
    r"|is neither AF_INET\(\d+\) nor AF_INET6\(\d+\)"
    r"|unable to find address for: (?P<interface>\S+)|ifa != nullptr. Unable to find",
    "The network interface that NCCL or Gloo was told to use is not on the node",
    "ip -br addr  # on the node; `interface` of the site file, or NCCL_SOCKET_IFNAME, must name one of them",
)
VERSIONS = GpuError(
    "nccl-versions",
    CONFIGURATION,
    r"Mismatched NCCL version detected|NCCL version mismatch|undefined symbol: nccl\w+",
    "The ranks, or torch and the library that it loads, have different versions of NCCL",
    "python -c 'import torch; print(torch.cuda.nccl.version())'  # on each node; `module list`, LD_LIBRARY_PATH",
)
LOST = GpuError(
    "peer-lost",
    RANK_LOST,
    r"ncclRemoteError|remote process exited or there was a network error|(?:communicator|collective) was aborted"
    r"|NCCL communicator was aborted|ncclCommAbort|collective operation timeout|WorkNCCL\(.*timed out"
    r"|Watchdog caught collective|Connection (?:closed|reset) by (?:remote )?peer|Broken pipe",
    "A rank lost another one, which had failed before",
)
KINDS: Tuple[GpuError, ...] = (BROKEN, FULL, SHARED, NO_INTERFACE, VERSIONS, LOST)
"""The first one whose pattern fits counts: a broken GPU also aborts the communicators of its rank."""


def classify(text: str) -> Optional[GpuError]:
    """The kind of an error by its text, whatever its lines; None: of no known kind."""
    for kind in KINDS:
        if re.search(kind.pattern, text):
            return kind
    return None
