"""Rules about CUDA, GPUs and what NCCL needs; those that trainers know as well are in `gpu_errors`."""

from __future__ import annotations

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.rules.rule import Rule, gpu_rule, rule

_BAD_NODE = "{again} --exclude {host}  # and tell the administrators"

GPU: tuple[Rule, ...] = (
    gpu_rule(gpu_errors.BROKEN, _BAD_NODE),
    gpu_rule(gpu_errors.NOT_READY, _BAD_NODE),
    gpu_rule(gpu_errors.FULL),
    rule(
        gpu_errors.FULL.cause,
        r"RESOURCE_EXHAUSTED: .*(?i:out of memory|failed to allocate)",  # JAX, TensorFlow
        gpu_errors.FULL.text,
        "a smaller batch",
    ),
    gpu_rule(gpu_errors.SHARED),
    gpu_rule(gpu_errors.NO_INTERFACE),
    gpu_rule(gpu_errors.VERSIONS),
    gpu_rule(gpu_errors.DRIVER),
    gpu_rule(gpu_errors.ARCHITECTURE),
    gpu_rule(gpu_errors.CUDNN_VERSIONS),
    gpu_rule(gpu_errors.MISSING, "{again} --gpus-per-node 1"),
    rule(
        gpu_errors.MISSING.cause,
        r"No devices were found",  # nvidia-smi
        gpu_errors.MISSING.text,
        "{again} --gpus-per-node 1",
    ),
    rule(
        "gpu-busy",
        r"CUDA-capable device\(s\) is/are busy or unavailable|all CUDA-capable devices are busy",
        "The GPU is used by another process and admits one only (compute mode), or its driver gives it to nobody",
        "nvidia-smi  # on the node: `Compute M.` and the processes; two ranks must not take the same GPU",
        certain=False,
    ),
    gpu_rule(gpu_errors.NUMBER),
    rule(
        "gpu-assertion",
        r"device-side assert triggered|CUDA error: an illegal memory access",
        "A kernel on the GPU met a wrong index or address; often a label outside the number of classes",
        "{again} --env CUDA_LAUNCH_BLOCKING=1  # names the line",
    ),
    rule(
        "gpu-kernel-failed",
        r"unspecified launch failure|CUDA error: (?:misaligned address|an illegal instruction|hardware stack error"
        r"|invalid program counter)|Memory access fault by GPU node|HSA_STATUS_ERROR_EXCEPTION",
        "A kernel on the GPU was ended: mostly by a wrong address in the program or in an extension",
        "{again} --env CUDA_LAUNCH_BLOCKING=1 --env AMD_SERIALIZE_KERNEL=3  # names the line",
        certain=False,
    ),
)
