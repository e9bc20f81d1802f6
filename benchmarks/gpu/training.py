"""Steps that train: losses against the CPU's, memory against arithmetic, resuming, and errors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from gpu.bench import Bench, Trained
from gpu.steps import CannotRun, Figures, Step
from hpcjobs.runtime.exits import ExitCode

LM = ("--workload", "lm", "--preset", "tiny", "--sequence-length", "32", "--train-samples", "1024")
MNIST = ("--workload", "mnist")
EVERY_STEP = ("--log-every", "1", "--clip-norm", "1", "--no-probe", "--eval-every", "0", "--resume", "none")
GLOBAL_BATCH = 16
FP32_TOLERANCE, MNIST_TOLERANCE, LOWER_TOLERANCE, RESUME_TOLERANCE = 1e-3, 5e-3, 3e-2, 1e-3
"""Relative, per step: a GPU adds in another order than a CPU, convolutions by other algorithms; bf16 and fp16 have 8
and 11 bits."""
ADAM_BYTES = 16  # per weight in fp32: itself, its gradient, two moments
TRAINERS = {
    "ddp": ("ddp",),
    "ddp_scratch": ("ddp_scratch",),
    "fsdp": ("fsdp",),
    "fsdp_scratch": ("fsdp_scratch",),
    "lightning": ("lightning",),
    "lightning-fsdp": ("lightning", "--strategy", "fsdp"),
    "horovod": ("horovod",),
}
NEEDS = {"lightning": "lightning", "horovod": "horovod"}


def share_batch(bench: Bench, ranks: int) -> tuple[str, str]:
    return "--batch-size", str(max(1, GLOBAL_BATCH // ranks))


def count_steps(bench: Bench) -> tuple[str, str]:
    return "--steps", str(bench.choose(20, 6))


def reference(bench: Bench, workload: tuple[str, ...]) -> list[float]:
    """The CPU's losses by ddp on one rank, in fp32; trained once."""
    name = f"reference-{workload[1]}"
    folder = bench.out / "runs" / name
    if (folder / "summary.json").exists():
        return Trained([], folder).losses()
    flags = (*workload, *EVERY_STEP, *count_steps(bench), *share_batch(bench, 1))
    return bench.train(name, "ddp", *flags, device="cpu", ranks=1).losses()


def even_ranks(bench: Bench) -> int:
    """Ranks among which the global batch divides."""
    return max(size for size in (1, 2, 4, 8, 16) if size <= bench.ranks)


def compare_losses(
    name: str, workload: tuple[str, ...], tolerance: float, more: tuple[str, ...], bench: Bench
) -> Figures:
    trainer, *flags = TRAINERS[name]
    package = NEEDS.get(trainer)
    if package is not None and find_spec(package) is None:
        raise CannotRun(f"the package {package} is not installed")
    expected, ranks = reference(bench, workload), even_ranks(bench)
    lower = ("--precision", bench.precision) if "lower" in more else ()
    label = f"{name}-{workload[1]}{'-lower' if lower else ''}"
    flags_of_run = (*flags, *workload, *EVERY_STEP, *count_steps(bench), *share_batch(bench, ranks), *lower)
    trained = bench.train(label, trainer, *flags_of_run, ranks=ranks)
    losses = trained.losses()
    off = [abs(loss - cpu_loss) / abs(cpu_loss) for loss, cpu_loss in zip(losses, expected, strict=True)]
    return {
        "ranks": ranks,
        "device": trained.summary.device_name or trained.summary.device,
        "largest_deviation": max(off),
        "tolerance": tolerance,
        "losses": losses,
        "cpu_losses": expected,
        "precision": trained.summary.precision,
    }


def check_losses(figures: Figures) -> Iterator[str]:
    if not figures["largest_deviation"] <= figures["tolerance"]:  # nan too
        yield f"losses differ from the CPU's by up to {figures['largest_deviation']:.2g}, not {figures['tolerance']:g}"


def measure_memory(bench: Bench) -> Figures:
    """The peak of fsdp on a model whose weights, and not its activations, fill the memory."""
    sizes = bench.choose(("--preset", "gpt2"), ("--preset", "tiny"))
    flags = ("--workload", "lm", *sizes, "--sequence-length", "64", "--batch-size", "1", "--steps", "4", "--no-probe")
    summary = bench.train("fsdp-memory", "fsdp", *flags, "--eval-every", "0", "--resume", "none").summary
    if summary.parameters is None or summary.memory_peak_bytes is None:
        raise RuntimeError("the summary has no peak of memory")
    shards = ADAM_BYTES * summary.parameters / summary.world_size
    blocks = 12 * 12 * 768**2 if not bench.rehearse else 0
    gathered = 8 * (summary.parameters - blocks)  # of the outermost unit, complete: weights and gradients
    logits = 64 * 50304 * 4 * 4 if not bench.rehearse else 0  # with their softmax, both with gradients
    return {
        "ranks": summary.world_size,
        "parameters": summary.parameters,
        "peak_bytes": summary.memory_peak_bytes,
        "shards_bytes": shards,
        "expected_at_most_bytes": 1.25 * (shards + gathered + logits) + 256e6,
        "judged": not bench.rehearse,
    }


def check_memory(figures: Figures) -> Iterator[str]:
    """On CPUs the peak is that of the process, which says nothing."""
    if not figures["judged"]:
        return
    least, most = 0.9 * figures["shards_bytes"], figures["expected_at_most_bytes"]
    if not least <= figures["peak_bytes"] <= most:
        peak = figures["peak_bytes"] / 1e9
        yield f"the peak is {peak:.2f} GB; by the model's arithmetic it is {least / 1e9:.2f} to {most / 1e9:.2f}"


def resume_after_kill(bench: Bench) -> Figures:
    """A run that SIGKILL ends, and its continuation, beside one that nothing ended."""
    steps = bench.choose(60, 24)
    flags = (*LM, "--log-every", "1", "--no-probe", "--eval-every", "0", "--steps", str(steps), *share_batch(bench, 1))
    saving = ("--checkpoint-every", "4")
    uninterrupted = bench.train("uninterrupted", "fsdp", *flags, "--resume", "none", ranks=1)
    killed = bench.train("killed", "fsdp", *flags, *saving, ranks=1, kill_at_step=steps // 3)
    again = bench.train("killed", "fsdp", *flags, *saving, ranks=1)
    expected, losses = uninterrupted.losses(), again.losses()
    return {
        "killed_with": killed.code,
        "resumed_from_step": again.summary.resumed_from_step,
        "steps": len(losses),
        "expected_steps": len(expected),
        "largest_deviation": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False)),
        "tolerance": RESUME_TOLERANCE,
    }


def check_resumed(figures: Figures) -> Iterator[str]:
    if figures["killed_with"] != 137:
        yield f"the run ended with {figures['killed_with']}, not by SIGKILL"
    if not figures["resumed_from_step"]:
        yield "the second attempt began anew"
    if figures["steps"] != figures["expected_steps"]:
        yield f"{figures['steps']} lines of steps, not {figures['expected_steps']}"
    if not figures["largest_deviation"] <= figures["tolerance"]:
        yield f"losses differ from those of the uninterrupted run by up to {figures['largest_deviation']:.2g}"


def exhaust_memory(bench: Bench) -> Figures:
    """More than any GPU has; in a rehearsal the error that torch would raise."""
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    flags = ("--workload", "gpu.workloads:too_large", "--steps", "2", "--resume", "none")
    ended = bench.train("out-of-memory", "ddp", *flags, ranks=1, env=path)
    return {"code": ended.code, "expected_code": int(ExitCode.OUT_OF_MEMORY), "message": find_error(ended)}


def hide_gpus(bench: Bench) -> Figures:
    """A job that has GPUs, and a rank that sees none."""
    env = {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    ended = bench.train("no-device", "ddp", *LM, "--steps", "1", device="auto", ranks=1, env=env)
    return {"code": ended.code, "expected_code": int(ExitCode.CONFIGURATION), "message": find_error(ended)}


def find_error(ended: Trained) -> str:
    return next((line for line in ended.text.splitlines() if line.startswith("error: ")), "")


def check_error(expected_text: str) -> Callable[[Figures], Iterable[str]]:
    def check(figures: Figures) -> Iterator[str]:
        if figures["code"] != figures["expected_code"]:
            yield f"the run ended with {figures['code']}, not {figures['expected_code']}"
        if expected_text not in figures["message"]:
            yield f"the message has no {expected_text!r}: {figures['message'] or 'there is none'}"

    return check


def losses_step(name: str, workload: tuple[str, ...], tolerance: float, *more: str) -> Step:
    label = f"losses-{name}" + ("" if workload is LM else f"-{workload[1]}") + ("-lower" if "lower" in more else "")
    about = f"{name} on {workload[1]}{' in bf16 or fp16' if more else ''}: losses within {tolerance:g} of the CPU's"
    return Step(label, about, partial(compare_losses, name, workload, tolerance, more), check_losses)


HOROVOD = losses_step("horovod", LM, FP32_TOLERANCE)
STEPS = (
    *(losses_step(name, LM, FP32_TOLERANCE) for name in TRAINERS if name != "horovod"),
    losses_step("ddp", MNIST, MNIST_TOLERANCE),
    losses_step("ddp", LM, LOWER_TOLERANCE, "lower"),
    losses_step("fsdp", LM, LOWER_TOLERANCE, "lower"),
    Step("fsdp-memory", "peak memory of fsdp against the model's arithmetic", measure_memory, check_memory),
    Step(
        "resume",
        "fsdp resumes after SIGKILL with the losses of a run that nothing ended",
        resume_after_kill,
        check_resumed,
    ),
    Step(
        "out-of-memory",
        "an allocation that no GPU can hold ends with code 12, and torch's figures",
        exhaust_memory,
        check_error("out of GPU memory"),
    ),
    Step(
        "no-device", "a job with GPUs of which a rank sees none ends with code 23", hide_gpus, check_error("sees none")
    ),
)
