"""Captures the state of a trainer, writes it into a checkpoint, reads it and restores it.

`runtime/checkpoints.py` has the folder of a checkpoint and its manifest.

checkpoints/step-00000120/state.pt        torch.save: model, optimizer, scaler, RNG by rank
checkpoints/step-00000120/parts/          sharded tensors, by torch.distributed.checkpoint

Each rank writes its shards into a separate file, so no rank holds complete tensors. Ranks of another world size or
layout read their shards from all files.

`CheckpointWriter` writes in the background, from copies in buffers that are used again.
"""

from __future__ import annotations

import errno
import json
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hpcjobs import torch_state
from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoint_writer import BackgroundWriter
from hpcjobs.runtime.checkpoints import MANIFEST, CheckpointClaim, CheckpointMeta, Draft, Sums, measure, read_meta
from hpcjobs.runtime.exits import BadCheckpoint, LossNotFinite, MissingData, UsageError
from hpcjobs.torch_state import Buffers, Keys
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.optimization import Stepper, TrainingPlan

MARK = "hpcjobs.part"
Where = tuple[str | int, ...]


def _join(where: Where) -> str:
    return "/".join(map(str, where))


def split_tensors(tree: Any, where: Where = ()) -> tuple[Any, dict[str, DTensor]]:
    """Return the tree with a mark in place of each sharded tensor, and the sharded tensors by their path."""
    if isinstance(tree, DTensor):
        return {MARK: _join(where)}, {_join(where): tree}
    if not isinstance(tree, dict):
        return tree, {}
    both = {name: split_tensors(value, (*where, name)) for name, value in tree.items()}
    parts = {name: part for _, inner in both.values() for name, part in inner.items()}
    return {name: rest for name, (rest, _) in both.items()}, parts


def find_marks(tree: Any, where: Where = ()) -> Iterator[Where]:
    """Yield the path of each mark in the tree."""
    if isinstance(tree, dict):
        if MARK in tree:
            yield where
        for name, value in tree.items():
            yield from find_marks(value, (*where, name))


def put_tensors_back(tree: Any, parts: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `split_tensors`."""
    if not isinstance(tree, dict):
        return tree
    return parts[tree[MARK]] if MARK in tree else {name: put_tensors_back(value, parts) for name, value in tree.items()}


def on_cpu(mesh: DeviceMesh) -> DeviceMesh:
    """The same layout for copies in host memory; a collective call where the mesh is of GPUs."""
    if mesh.device_type == "cpu":
        return mesh
    return init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)


class PartsWriter(FileSystemWriter):
    """Ranks begin and end together; an error of one rank is raised on all."""

    def __init__(self, folder: Path, *, begin: Callable[[], None], complete: Callable[[Sums], None]) -> None:
        super().__init__(folder)
        self._folder, self._begin, self._complete = folder, begin, complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the first rank makes the folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()  # torch calls this on the first rank alone, before any rank writes
        self._folder.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in written})
        # as further results: so they come to the first rank without a collective call of our own
        sums = [WriteResult(MetadataIndex(name), 0, measure(self._folder / name)) for name in names]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*written, *sums])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = [result for of_rank in results for result in of_rank]
        sums = {str(r.index.fqn): r.storage_data for r in everything if isinstance(r.storage_data, tuple)}
        super().finish(metadata, [[r for r in everything if not isinstance(r.storage_data, tuple)]])
        sums[".metadata"] = measure(self._folder / ".metadata")
        self._complete(sums)


def _write_parts(parts: dict[str, DTensor], writer: PartsWriter, together: dist.ProcessGroup) -> None:
    """A collective call over `together`. OSError on every rank if the storage failed one of them."""
    try:
        save(dict(parts), storage_writer=writer, process_group=together)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        for cause in causes:
            if isinstance(cause, OSError):
                raise cause from None
        if any("PytorchStreamWriter" in str(cause) for cause in causes):  # torch hides the error of its file
            raise OSError(errno.EIO, str(causes[0]).splitlines()[0]) from None
        raise RuntimeError(str(error)) from causes[0]


def _read_parts(folder: Path, tree: Any, placed: Callable[[Where], torch.Tensor | None]) -> Any:
    """Return the tree with its tensors, each read into the tensor from `placed`, or complete. A collective call."""
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    parts: dict[str, torch.Tensor] = {}
    for where in find_marks(tree):
        mine, there = placed(where), known[_join(where)]
        assert isinstance(there, TensorStorageMetadata)
        parts[_join(where)] = torch.empty(there.size, dtype=there.properties.dtype) if mine is None else mine
    with warnings.catch_warnings():  # the export runs in one process on purpose
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(dict(parts), storage_reader=reader)
    return put_tensors_back(tree, parts)


STATE, PARTS = "state.pt", "parts"


@dataclass(frozen=True)
class WriterGroup:
    """The ranks that write one checkpoint, each its parts; the first of them makes and renames its folder."""

    ranks: dist.ProcessGroup
    owner: int  # process id of the first


def write(
    folder: Path,
    meta: CheckpointMeta,
    state: Any,
    together: WriterGroup | None = None,
    *,
    claim: CheckpointClaim | None = None,
) -> Path:
    """Write one checkpoint under a temporary name, sync and rename it; a collective call of ranks `together`.

    After an OSError earlier checkpoints are unchanged, and the draft is removed.
    """
    draft = Draft(folder, meta, claim=claim, owner=None if together is None else together.owner)
    tree, in_parts = split_tensors(state)

    def begin() -> None:
        draft.begin()
        torch_state.write(draft.path / STATE, tree)

    def complete(sums: Sums) -> None:
        of_parts = {f"{PARTS}/{name}": sum_ for name, sum_ in sums.items()}
        draft.complete({STATE: measure(draft.path / STATE), **of_parts})

    try:
        if together is None:
            begin()
            complete({})
        else:
            writer = PartsWriter(draft.path / PARTS, begin=begin, complete=complete)
            _write_parts(in_parts, writer, together.ranks)
    except BaseException:
        draft.discard()
        raise
    return draft.place


def read(
    place: Path, placed: Callable[[Where], torch.Tensor | None] = lambda where: None
) -> tuple[CheckpointMeta, Any]:
    """A checkpoint's metadata and state, in host memory; only plain values and tensors are unpickled.

    A collective call if the checkpoint has sharded tensors; each is read into the tensor from `placed`.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        state = torch_state.read(place / STATE, any_object=False)
        if (place / PARTS).is_dir():
            state = _read_parts(place / PARTS, state, placed)
    except (OSError, ValueError, RuntimeError, CheckpointException) as error:
        raise BadCheckpoint(f"{place} can't be loaded: {error}") from error
    return read_meta(manifest), state


class CheckpointWriter(BackgroundWriter):
    """One writer, or one of several that each write their parts; then every method is a collective call."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        background: bool,
        on_written: Callable[[int], None] = lambda step: None,
        together: WriterGroup | None = None,
        first: bool = True,
        agree: Callable[[bool], bool] = lambda mine: mine,
    ) -> None:
        """`first`: whether this rank makes and completes the checkpoints."""
        super().__init__(
            folder,
            keep=keep,
            background=background,
            on_written=on_written,
            first=first,
            owner=None if together is None else together.owner,
            agree=agree,
        )
        self._together, self._buffers = together, ShardBuffers()

    def copy_state(self, state: Any) -> Any:
        return self._buffers.copy(state)

    def write_files(self, meta: CheckpointMeta, state: Any) -> Path:
        return write(self.folder, meta, state, self._together, claim=self.claim)


class ShardBuffers(Buffers):
    """Copies this rank's part of sharded tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._mesh: DeviceMesh | None = None

    def copy_tree(self, value: Any, path: Keys) -> Any:
        if isinstance(value, DTensor):
            self._mesh = self._mesh or on_cpu(value.device_mesh)
            local: torch.Tensor = value.to_local()
            copied, layout = self.copy_tensor(local.detach(), path), value.placements
            return DTensor.from_local(
                copied, self._mesh, layout, run_check=False, shape=value.shape, stride=tuple(value.stride())
            )
        return super().copy_tree(value, path)


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
    trained = (parameter for parameter in stepper.strategy.parameters(stepper.model) if parameter.requires_grad)
    own = (part.to_local() if isinstance(part, DTensor) else part for part in trained)
    wrong = [(~tensor.isfinite()).any() for tensor in own]
    count = torch.stack(wrong).any().float() if wrong else torch.zeros((), device=group.device)
    if float(group.max(count)):
        raise LossNotFinite(
            f"weights are not finite after step {step}, which is not saved",
            hint="a smaller --lr, --warmup-steps, --clip-norm 1.0, or --precision bf16 instead of fp16",
        )


def restore(state: dict[str, Any], stepper: Stepper, group: RankGroup) -> None:
    """Load a saved state. Raises UsageError if it belongs to another optimizer."""
    name = state.get("optimizer_name", stepper.optimizer_name)  # missing in checkpoints of earlier versions
    if name != stepper.optimizer_name:
        raise UsageError(
            f"the checkpoint has the state of the optimizer {name}, and this run has {stepper.optimizer_name}",
            hint="--init-from the weights that checkpoint.export writes: a new run, whose optimizer starts anew",
        )
    # first: to load a state replaces the settings of this run's groups by the saved ones
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
    answer = group.from_first(_choose_on_first(resume, run_dir, group) if group.rank == 0 else "")
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


def _choose_on_first(resume: str, run_dir: Path, group: RankGroup) -> str:
    """Return a sound checkpoint, empty text before the first one, or "!" and the reason why none can be used."""
    job = None
    if resume != "auto":
        job = checkpoints.name_job(os.environ) if is_later_attempt() else None
        if job is None:
            return _choose_first(resume)
    try:
        newest = checkpoints.resume_from(run_dir / checkpoints.FOLDER, report=group.log, job=job)
    except BadCheckpoint as error:
        return f"!{error.message}"
    if newest is not None:
        return str(newest.resolve())
    return "" if job is None else _choose_first(resume)


def _choose_first(resume: str) -> str:
    """Where `--resume none` or `--resume FOLDER` begins, as `_choose_on_first`."""
    if resume == "none":
        return ""
    wrong = checkpoints.damage(Path(resume))
    return str(Path(resume).resolve()) if wrong is None else f"!--resume {resume}: {wrong}"


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
