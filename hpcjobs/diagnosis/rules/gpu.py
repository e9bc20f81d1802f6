"""Rules about CUDA, GPUs and what NCCL needs; those that trainers know as well are in `gpu_errors`."""

from __future__ import annotations

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.rules.rule import Rule, gpu_rule, rule

_BAD_NODE = "{again} --exclude {host}  # and tell the administrators"

GPU: tuple[Rule, ...] = (
    gpu_rule(gpu_errors.BROKEN, _BAD_NODE),
    gpu_rule(gpu_errors.FULL),
    gpu_rule(gpu_errors.SHARED),
    gpu_rule(gpu_errors.NO_INTERFACE),
    gpu_rule(gpu_errors.VERSIONS),
    rule(
        "gpu-missing",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE|Found no NVIDIA driver"
        r"|CUDA-capable device\(s\) is/are busy|No devices were found"
        r"|AssertionError: Torch not compiled with CUDA enabled"
        r"|Torch not compiled with CUDA enabled",
        "The program needs a GPU and has none: none was requested, or this torch is built without CUDA",
        "{again} --gpus-per-node 1",
    ),
    rule(
        "gpu-number",
        r"invalid device ordinal|CUDA_ERROR_INVALID_DEVICE",
        "A rank asked for a GPU by a number that it does not see",
        "use LOCAL_RANK modulo torch.cuda.device_count(): with --gpus-per-task each rank sees its own GPU as number 0",
    ),
    rule(
        "driver-too-old",
        r"driver version is insufficient|The NVIDIA driver on your system is too old|CUDA driver version.*insufficient"
        r"|forward compatibility was attempted on non supported HW",
        "The NVIDIA driver of the node is older than this build of CUDA needs",
        "nvidia-smi  # on the node; install torch for that CUDA version, or use a container that hpcjobs checked",
    ),
    rule(
        "gpu-architecture",
        r"no kernel image is available for execution|sm_\d+ is not compatible with the current PyTorch",
        "This build of torch or of an extension has no code for the GPU's architecture",
        "python -c 'import torch; print(torch.cuda.get_arch_list())'",
    ),
    rule(
        "gpu-assertion",
        r"device-side assert triggered|CUDA error: an illegal memory access",
        "A kernel on the GPU met a wrong index or address; often a label outside the number of classes",
        "{again} --env CUDA_LAUNCH_BLOCKING=1  # names the line",
    ),
)
