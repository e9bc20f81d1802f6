"""Rules about CUDA, GPUs and NCCL's needs: the table `gpu_errors`, and errors that only a log shows."""

from __future__ import annotations

from hpcjobs import gpu_errors
from hpcjobs.diagnosis.rules.rule import Rule, rule

_BAD_NODE = "{again} --exclude {host}  # and tell the administrators"
_FIXES = {
    gpu_errors.BROKEN: _BAD_NODE,
    gpu_errors.NOT_READY: _BAD_NODE,
    gpu_errors.MISSING: "{again} --gpus-per-node 1",
}
"""Commands for a job, where the table has none or one for a trainer."""

GPU: tuple[Rule, ...] = (
    *(
        rule(error.cause, error.pattern, error.text, _FIXES.get(error, error.fix))
        for error in gpu_errors.KINDS
        if error.effect != gpu_errors.RANK_LOST  # a consequence: among the rules of ranks
    ),
    rule(
        gpu_errors.FULL.cause,
        r"RESOURCE_EXHAUSTED: .*(?i:out of memory|failed to allocate)",  # JAX, TensorFlow
        gpu_errors.FULL.text,
        "a smaller batch",
    ),
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
