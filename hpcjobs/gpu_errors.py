"""Errors of CUDA, ROCm and NCCL by their texts, each with its meaning and remedy.

Three readers share them: trainers, which choose their exit code by them; the process on the node that decides about
further attempts; and `hpcjobs why`. Standard library of Python 3.6.
"""

import re
from typing import NamedTuple, Optional, Tuple

OUT_OF_MEMORY, FAULT, CONFIGURATION, RANK_LOST = "out of memory", "fault", "configuration", "rank lost"
"""The consequence of an error: a smaller step; another node; another job; another attempt."""


class GpuError(NamedTuple):
    """One kind of error."""

    cause: str
    """The name that `hpcjobs why` gives it."""
    effect: str
    pattern: str
    text: str
    fix: str = ""


FAULTY_XIDS = (46, 48, 62, 64, 74, 79, 94, 95, 110, 119, 120, 136, 140, 142, 143)
"""Events of the driver after which NVIDIA resets, drains or replaces a GPU. Others, such as 13, 31 and 43, come from
the program: a wrong address in a kernel."""
BROKEN = GpuError(
    "gpu-broken",
    FAULT,
    r"(?i)(?:uncorrectable (?:NVLink |ECC )+error|double[- ]bit ECC)(?!(?: error)?s?(?: count)?\W*(?:0|N/A)\b)"
    r"|ECC_UNCORRECTABLE|cudaErrorECC|fallen off the bus"
    rf"|NVRM: Xid \([^)]*\): (?:{'|'.join(map(str, FAULTY_XIDS))})\b|CUDA_ERROR_HARDWARE(?!_STACK)"
    r"|Unable to determine the device handle for GPU|\bGPU is lost\b|hipErrorECCNotCorrectable",
    "A GPU of the node has a hardware fault",
)
NOT_READY = GpuError(
    "gpu-not-ready",
    FAULT,
    r"system not yet initialized|(?:cudaError|CUDA_ERROR_)(?:SystemNotReady|SYSTEM_NOT_READY)"
    r"|Driver/library version mismatch|configuration error in the Fabric Manager or NVSwitches",
    "The node's NVIDIA driver is not ready: its Fabric Manager does not run, or the driver was updated under way",
)
FULL = GpuError(
    "gpu-out-of-memory",
    OUT_OF_MEMORY,
    r"(?i)(?:CUDA|HIP) out of memory|torch\.(?:cuda\.)?OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"
    r"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS)_STATUS_ALLOC_FAILED|(?:CUDA|HIP) (?:driver )?error: out of memory"
    r"|Triton Error \[(?:CUDA|HIP)\]: (?:.*: )?out of memory|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
    r"|(?:cuda|hip) failure (?:\d+ )?'out of memory'|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)",
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
    r"(?i)no socket interface found|NET/Socket ?: no (?:usable listening )?interface found"
    r"|no NCCL_SOCKET_IFNAME interface found|NCCL_SOCKET_IFNAME.*(?:not found|no match)"
    r"|is neither AF_INET\(\d+\) nor AF_INET6\(\d+\)"
    r"|unable to find address for: (?P<interface>\S+)|ifa != nullptr. Unable to find",
    "The network interface that NCCL or Gloo was told to use is not on the node",
    "ip -br addr  # on the node; the key interface of the site file, or NCCL_SOCKET_IFNAME, must name one of them",
)
VERSIONS = GpuError(
    "nccl-versions",
    CONFIGURATION,
    r"Mismatched NCCL version detected|NCCL version mismatch|undefined symbol: nccl\w+",
    "The ranks, or torch and the library that it loads, have different versions of NCCL",
    "python -c 'import torch; print(torch.cuda.nccl.version())'  # on each node; look at module list, LD_LIBRARY_PATH",
)
DRIVER = GpuError(
    "driver-too-old",
    CONFIGURATION,
    r"driver version is insufficient|The NVIDIA driver on your system is too old"
    r"|not supported in the installed CUDA driver|forward compatibility was attempted on non supported HW"
    r"|unsupported display driver / cuda driver combination|PTX was compiled with an unsupported toolchain",
    "The NVIDIA driver of the node is older than this build of CUDA needs, or another than the libcuda that was found",
    "nvidia-smi  # on the node; install torch for that CUDA version, or use a container that hpcjobs checked",
)
ARCHITECTURE = GpuError(
    "gpu-architecture",
    CONFIGURATION,
    r"no kernel image is available for execution|sm_\d+ is not compatible with the current PyTorch"
    r"|hipErrorNoBinaryForGpu|(?:CUDA|HIP) error: (?:invalid device function|device kernel image is invalid)"
    r"|only supports Ampere GPUs or newer|too old to be supported by the [Tt]riton",
    "This build of torch or of an extension has no code for the GPU's architecture",
    "python -c 'import torch; print(torch.cuda.get_arch_list())'",
)
CUDNN_VERSIONS = GpuError(
    "cudnn-versions",
    CONFIGURATION,
    r"cuDNN version incompatibility",
    "torch loads another version of cuDNN than it was built with",
    "python -c 'import torch; print(torch.backends.cudnn.version())'  # look at module list, LD_LIBRARY_PATH",
)
MISSING = GpuError(
    "gpu-missing",
    CONFIGURATION,
    r"No (?:CUDA|HIP) GPUs are available|no (?:CUDA|ROCm)-capable device is detected|CUDA_ERROR_NO_DEVICE"
    r"|ProcessGroupNCCL is only supported with GPUs|Found no NVIDIA driver|Torch not compiled with CUDA enabled",
    "The program needs a GPU and has none: none was requested, or this torch is built without CUDA",
    "nvidia-smi or rocm-smi on the node, and a torch with CUDA or ROCm",
)
NUMBER = GpuError(
    "gpu-number",
    CONFIGURATION,
    r"invalid device ordinal|(?:cudaError|CUDA_ERROR_|hipError)(?:InvalidDevice\b|INVALID_DEVICE\b)",
    "A rank asked for a GPU by a number that it does not see",
    "use LOCAL_RANK modulo torch.cuda.device_count(): with --gpus-per-task each rank sees its own GPU as number 0",
)
LOST = GpuError(
    "peer-lost",
    RANK_LOST,
    r"ncclRemoteError|remote process exited or there was a network error|(?:communicator|collective) was aborted"
    r"|NCCL communicator was aborted|ncclCommAbort|retrieving ncclUniqueId from .* got error"
    r"|collective operation timeout|WorkNCCL\(.*timed out"
    r"|Watchdog caught collective|Connection (?:closed|reset) by (?:remote )?peer|Broken pipe",
    "A rank lost another one, which had failed before",
)
KINDS: Tuple[GpuError, ...] = (
    BROKEN,
    NOT_READY,
    FULL,
    SHARED,
    NO_INTERFACE,
    VERSIONS,
    DRIVER,
    ARCHITECTURE,
    CUDNN_VERSIONS,
    MISSING,
    NUMBER,
    LOST,
)
"""The first kind with a matching pattern counts: a broken GPU also aborts the communicators of its rank."""


def classify(text: str) -> Optional[GpuError]:
    """The kind of an error by its text, whatever its lines; None: of no known kind."""
    for kind in KINDS:
        if re.search(kind.pattern, text):
            return kind
    return None
