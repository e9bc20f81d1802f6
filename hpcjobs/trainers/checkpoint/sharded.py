"""Writes and reads sharded tensors by torch.distributed.checkpoint.

Each rank writes its shards into its own file, so no rank ever holds more. A world of another size or layout reads its
shards from all files.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator, Mapping
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

MARK = "hpcjobs.part"
Where = tuple[str | int, ...]
Sums = dict[str, tuple[int, int]]
"""Size and CRC-32 by name of a file."""


def key(where: Where) -> str:
    return "/".join(map(str, where))


def split_tensors(tree: Any, where: Where = ()) -> tuple[Any, dict[str, DTensor]]:
    """The tree with a mark in the place of each tensor in parts, and these by the key of their place."""
    if isinstance(tree, DTensor):
        return {MARK: key(where)}, {key(where): tree}
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


def like(part: DTensor, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`local` as this rank's part of a tensor laid out as `part` is."""
    return DTensor.from_local(
        local, mesh, part.placements, run_check=False, shape=part.shape, stride=tuple(part.stride())
    )


class Writer(FileSystemWriter):
    """Ranks begin and end together; an error of one rank is raised on all."""

    def __init__(
        self,
        folder: Path,
        *,
        measure: Callable[[Path], tuple[int, int]],
        begin: Callable[[], None],
        complete: Callable[[Sums], None],
    ) -> None:
        super().__init__(folder)
        self._folder, self._measure, self._begin, self._complete = folder, measure, begin, complete

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the first rank makes the folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._begin()
        self._folder.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner).wait()
        names = sorted({result.storage_data.relative_path for result in written})
        sums = [WriteResult(MetadataIndex(name), 0, self._measure(self._folder / name)) for name in names]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*written, *sums])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = [result for of_rank in results for result in of_rank]
        sums = {str(r.index.fqn): r.storage_data for r in everything if isinstance(r.storage_data, tuple)}
        super().finish(metadata, [[r for r in everything if not isinstance(r.storage_data, tuple)]])
        sums[".metadata"] = self._measure(self._folder / ".metadata")
        self._complete(sums)


def write(parts: dict[str, DTensor], writer: Writer, together: dist.ProcessGroup) -> None:
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


def read(folder: Path, tree: Any, placed: Callable[[Where], torch.Tensor | None]) -> Any:
    """Return the tree with its tensors, each read into the tensor from `placed`, or complete. A collective call."""
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    parts: dict[str, torch.Tensor] = {}
    for where in find_marks(tree):
        mine, there = placed(where), known[key(where)]
        assert isinstance(there, TensorStorageMetadata)
        parts[key(where)] = torch.empty(there.size, dtype=there.properties.dtype) if mine is None else mine
    with warnings.catch_warnings():  # one process alone, as the export: that is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        load(dict(parts), storage_reader=reader)
    return put_tensors_back(tree, parts)
