"""Writes and reads the state of a trainer in a checkpoint (`runtime/checkpoints.py` has its folder and manifest).

checkpoints/step-00000120/state.pt        torch.save: model, optimizer, scaler, RNG by rank
checkpoints/step-00000120/parts/          sharded tensors, by torch.distributed.checkpoint

Each rank writes its shards into a separate file, so no rank holds complete tensors. Ranks of another world size or
layout read their shards from all files.

`CheckpointWriter` writes in the background, from copies in buffers that are used again.
"""

from __future__ import annotations

import errno
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from hpcjobs.runtime.checkpoint_writer import BackgroundWriter
from hpcjobs.runtime.checkpoints import (
    MANIFEST,
    CheckpointClaim,
    CheckpointMeta,
    Draft,
    Sums,
    measure,
    read_meta,
)
from hpcjobs.runtime.exits import BadCheckpoint
from hpcjobs.torch_state import Buffers, Keys

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


def as_part(part: DTensor, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`local` as this rank's part of a tensor laid out as `part` is."""
    return DTensor.from_local(
        local, mesh, part.placements, run_check=False, shape=part.shape, stride=tuple(part.stride())
    )


class PartsWriter(FileSystemWriter):
    """Ranks begin and end together; an error of one rank is raised on all."""

    def __init__(
        self,
        folder: Path,
        *,
        begin: Callable[[], None],
        complete: Callable[[Sums], None],
    ) -> None:
        super().__init__(folder)
        self._folder, self._begin, self._complete = folder, begin, complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the first rank makes the folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()
        self._folder.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in written})
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
            return as_part(value, self.copy_tensor(local.detach(), path), self._mesh)
        return super().copy_tree(value, path)
