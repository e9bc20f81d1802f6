"""Captures the state of a run for a checkpoint, and restores it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import BadCheckpoint, LossNotFinite, MissingData, UsageError
from hpcjobs.trainers.distributed.process_group import RankGroup
from hpcjobs.trainers.optimization.plan import TrainingPlan
from hpcjobs.trainers.optimization.step import Stepper

OF_FLAGS = ("weight_decay", "lr_scale")


def capture(stepper: Stepper, group: RankGroup) -> dict[str, Any]:
    """Return the state to save; a collective call, with the complete result on rank 0 alone."""
    generators = group.gather(own_generators(group))
    model, names = stepper.strategy.model_state(stepper.model), stepper.saved_names
    adapters = {} if stepper.adapters is None else {"adapters": stepper.adapters.as_dict()}
    return {
        **adapters,
        "model": model if names is None else {name: value for name, value in model.items() if name in names},
        "optimizer": stepper.strategy.optimizer_state(stepper.model, stepper.optimizer),
        "optimizer_name": stepper.optimizer_name,
        "scaler": stepper.scaler.state_dict(),
        "generators": generators,
        "parameter_names": stepper.parameter_names,
    }


@torch.no_grad()
def refuse_nan(stepper: Stepper, group: RankGroup, *, step: int) -> None:
    """Raise LossNotFinite on all ranks where trained weights are not finite: such a state is not to be saved.

    A collective call.
    """
    own = (local_part(parameter) for parameter in stepper.strategy.parameters(stepper.model) if parameter.requires_grad)
    wrong = [(~tensor.isfinite()).any() for tensor in own]
    count = torch.stack(wrong).any().float() if wrong else torch.zeros((), device=group.device)
    if float(group.max(count)):
        raise LossNotFinite(
            f"weights are not finite after step {step}, which is not saved",
            hint="a smaller --lr, --warmup-steps, --clip-norm 1.0, or --precision bf16 instead of fp16",
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def restore(state: dict[str, Any], stepper: Stepper, group: RankGroup) -> None:
    """Load a saved state. Raises UsageError if it belongs to another optimizer."""
    name = state.get("optimizer_name", stepper.optimizer_name)  # missing in checkpoints of earlier versions
    if name != stepper.optimizer_name:
        raise UsageError(
            f"the checkpoint has the state of the optimizer {name}, and this run has {stepper.optimizer_name}",
            hint="--init-from the weights that checkpoint.export writes: a new run, whose optimizer starts anew",
        )
    take_settings(stepper.optimizer, state["optimizer"], complete=isinstance(stepper.workload.optimizer, str))
    if stepper.saved_names is None:
        stepper.strategy.load_model_state(stepper.model, state["model"])
    else:  # frozen weights were read from their own file
        complete = {**stepper.strategy.model_state(stepper.model), **state["model"]}
        stepper.strategy.load_model_state(stepper.model, complete)
    stepper.strategy.load_optimizer_state(stepper.model, stepper.optimizer, state["optimizer"])
    stepper.scaler.load_state_dict(state["scaler"])
    if len(state["generators"]) == group.world_size:
        set_own_generators(state["generators"][group.rank], group)


def take_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any], *, complete: bool) -> None:
    """Replace the settings in the parameter groups of a saved state by this run's settings.

    Without `complete`, replace only OF_FLAGS: a workload's own optimizer may keep other values in its groups.
    """
    for group, fresh in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group.update({key: value for key, value in fresh.items() if key != "params" and (complete or key in OF_FLAGS)})


def own_generators(group: RankGroup) -> dict[str, Any]:
    device = torch.cuda.get_rng_state(group.device) if group.device.type == "cuda" else None
    kind, keys, *rest = np.random.get_state()
    numpy = [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest]  # plain values: no code is unpickled
    return {"torch": torch.get_rng_state(), "device": device, "python": random.getstate(), "numpy": numpy}


def set_own_generators(saved: dict[str, Any], group: RankGroup) -> None:
    torch.set_rng_state(saved["torch"])
    if saved["device"] is not None and group.device.type == "cuda":
        torch.cuda.set_rng_state(saved["device"], group.device)
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in saved:  # not in checkpoints of earlier versions
        kind, keys, *rest = saved["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def choose(resume: str, run_dir: Path, group: RankGroup) -> Path | None:
    """The checkpoint to start from, agreed by all ranks. Damaged ones are passed over, and the log names them.

    `resume` is the start of a job's first attempt; later attempts continue from the job's newest checkpoint.
    """
    chosen = _choose_on_first(resume, run_dir, group) if group.rank == 0 else None
    answer = group.from_first(_as_text(chosen))
    if answer.startswith("!"):
        raise BadCheckpoint(answer[1:], hint="--resume none starts over")
    if not answer:
        return None
    if not os.path.isdir(answer):
        raise MissingData(
            f"rank {group.rank} on {group.hosts[group.rank]} does not see {answer}",
            hint="the run folder must be on a file system that all hosts share",
        )
    return Path(answer)


def _as_text(chosen: Path | str | None) -> str:
    return "" if chosen is None else f"!{chosen}" if isinstance(chosen, str) else str(chosen)


def _choose_on_first(resume: str, run_dir: Path, group: RankGroup) -> Path | str | None:
    """Return a sound checkpoint, None before the first one, or the reason why none can be used."""
    job = None
    if resume != "auto":
        job = checkpoints.name_job(os.environ) if is_later_attempt() else None
        if job is None:
            return _choose_first(resume)
    try:
        newest = checkpoints.resume_from(run_dir / checkpoints.FOLDER, report=group.log, job=job)
    except BadCheckpoint as error:
        return error.message
    if newest is not None:
        return newest.resolve()
    return None if job is None else _choose_first(resume)


def _choose_first(resume: str) -> Path | str | None:
    """Where `--resume none` or `--resume FOLDER` begins."""
    if resume == "none":
        return None
    wrong = checkpoints.damage(Path(resume))
    return Path(resume).resolve() if wrong is None else f"--resume {resume}: {wrong}"


def is_later_attempt() -> bool:
    """Whether the scheduler, or torch's agent, has started this job's ranks before."""
    counts = (os.environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def changes(meta: CheckpointMeta, plan: TrainingPlan) -> str:
    """Describe changes since the checkpoint was written; empty without changes."""
    if meta.world_size == plan.world_size:
        return ""
    return (
        f"; world size {meta.world_size} -> {plan.world_size}: random generators start anew, "
        "the samples that are left of the epoch are dealt out to the new ranks"
    )
