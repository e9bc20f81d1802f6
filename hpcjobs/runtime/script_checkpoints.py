"""Checkpoints of a program's own state: one file, or one of each rank.

checkpoints/step-00000120/state.pt           written by rank 0 (.json, .pt or .pkl)
checkpoints/step-00000120/ranks/rank-3.pt    with `sharded`: written by rank 3

| the state holds | file | read back |
|---|---|---|
| dicts with text as keys, lists, text, numbers, booleans, None | .json | |
| tensors, with any other values | .pt | on the CPU |
| other values, tuples and dicts with other keys included | .pkl | |

Files of the last two kinds can run code when they are read, so they are read only if they belong to this user.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcjobs.files import open_regular, write_beside
from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoint_writer import BackgroundWriter, CheckpointKeeper
from hpcjobs.runtime.checkpoints import MANIFEST, CheckpointMeta, Draft, measure
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import BadCheckpoint, LossNotFinite, WorldMismatch
from hpcjobs.runtime.signals import JobControl, find_store

if TYPE_CHECKING:
    from hpcjobs.torch_state import Buffers


@dataclass(frozen=True)
class RunState:
    """A copy of a state: bytes, or a tree with copies of its tensors."""

    suffix: str
    content: Any


class Snapshots:
    """Takes snapshots; buffers for tensors are kept."""

    def __init__(self) -> None:
        self._buffers: Buffers | None = None

    def take(self, state: Any) -> RunState:
        """Raises TypeError where the state cannot be written."""
        try:
            if _holds_tensors(state):
                if self._buffers is None:
                    from hpcjobs.torch_state import Buffers

                    self._buffers = Buffers()
                return RunState(".pt", self._buffers.copy(state))
            if _is_json(state):
                return RunState(".json", json.dumps(state).encode())
            return RunState(".pkl", pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL))
        except RecursionError as error:
            raise TypeError("save(): the state can't be written: it holds itself, or is nested too deep") from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise TypeError(f"save(): the state can't be written: {error}") from error


def find_nan(state: Any) -> str | None:
    """Return the path of the first tensor with NaN, or None. Plain numbers may be NaN."""
    if not _holds_tensors(state):
        return None
    from hpcjobs import torch_state

    return torch_state.find_nan(state)


def write_state(path: Path, snapshot: RunState) -> Path:
    """Write a snapshot and sync it; the file, which is ``path`` with a suffix. Raises OSError."""
    file_path = path.with_suffix(snapshot.suffix)
    if snapshot.suffix == ".pt":
        from hpcjobs import torch_state

        torch_state.write(file_path, snapshot.content)
        return file_path
    with file_path.open("wb") as file:
        file.write(snapshot.content)
        file.flush()
        os.fsync(file.fileno())
    return file_path


def _read_file(path: Path) -> Any:
    """The state of ``path`` with any suffix. Raises BadCheckpoint."""
    files = [path.with_suffix(suffix) for suffix in (".json", ".pt", ".pkl") if path.with_suffix(suffix).exists()]
    if not files:
        raise BadCheckpoint(f"{path.parent} has no {path.name}.json, .pt or .pkl", hint="was it written by Run.save()?")
    (file_path,) = files
    try:
        with open_regular(file_path) as file:
            if file_path.suffix == ".json":
                return json.load(file)
            owner = os.fstat(file.fileno()).st_uid  # of what is read, whatever takes its name meanwhile
            if owner != os.geteuid():
                raise BadCheckpoint(
                    f"{file_path} belongs to user {owner}, and reading it could run code of theirs",
                    hint="copy the checkpoint, if you trust it",
                )
            if file_path.suffix == ".pt":
                from hpcjobs import torch_state

                return torch_state.read(file, any_object=True)
            return pickle.load(file)
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, ImportError, AttributeError) as error:
        raise BadCheckpoint(f"{file_path} can't be read: {error}") from error


def _holds_tensors(value: Any) -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if isinstance(value, torch.Tensor):
        if hasattr(value, "placements"):
            raise TypeError(
                "a tensor is spread over ranks (DTensor). Save its local part (.to_local()) with sharded=True, "
                "or the full state (torch.distributed.checkpoint.state_dict.get_model_state_dict)"
            )
        return True
    if isinstance(value, dict):
        return True in [_holds_tensors(item) for item in value.values()]
    return type(value) in (list, tuple) and True in [_holds_tensors(item) for item in value]


def _is_json(value: Any) -> bool:
    """Whether JSON gives back just this; types are compared exactly, since it would make lists of tuples."""
    if value is None or type(value) in (bool, int, float, str):
        return True
    if type(value) is list:
        return all(_is_json(item) for item in value)
    return type(value) is dict and all(type(key) is str and _is_json(item) for key, item in value.items())


STATE, RANKS, SUMS = "state", "ranks", ".sums"
SHARDS_WAIT_S = 600.0
"""Limit of rank 0's wait for the files of the other ranks."""
POLL_S = 0.02
NAN = "nan"
"""In the place of a file's sums: the tensor of the rank's part that has NaN."""


@dataclass(frozen=True)
class Part:
    """The saved value of one rank: the state, or its part of it."""

    state: Any
    sharded: bool
    allow_nan: bool = False


class StateWriter(BackgroundWriter):
    """Writes in the background; without `sharded` rank 0 alone."""

    def __init__(self, folder: Path, *, keep: int, rank: int, attempt: str, on_written: Callable[[int], None]) -> None:
        """`attempt` names this start of the program: files of a rank that an earlier one left are not taken for new."""
        super().__init__(
            folder, keep=keep, background=True, on_written=on_written, first=rank == 0, owner=f"kit-{attempt}"
        )
        self._rank, self._snapshots = rank, Snapshots()

    def copy_state(self, state: Part) -> Part:
        return replace(state, state=self._snapshots.take(state.state))

    def find_refusal(self, state: Part) -> LossNotFinite | None:
        """NaN in other ranks' parts of a sharded state is found when it is written."""
        tensor_with_nan = None if state.sharded or state.allow_nan else find_nan(state.state)
        return None if tensor_with_nan is None else nan_error(tensor_with_nan)

    def write_files(self, meta: CheckpointMeta, state: Part) -> Path:
        part = state if isinstance(state.state, RunState) else self.copy_state(state)
        draft = Draft(self.folder, meta, claim=self.claim, owner=self.owner)
        tensor_with_nan = None if part.allow_nan else find_nan(part.state.content)
        if part.sharded:
            return self._write_shard(draft, part.state, tensor_with_nan)
        if tensor_with_nan is not None:
            raise nan_error(tensor_with_nan)
        try:
            draft.begin()
            path = write_state(draft.path / STATE, part.state)
            return draft.complete({path.name: measure(path)})
        except BaseException:
            draft.discard()
            raise

    def _write_shard(self, draft: Draft, snapshot: RunState, tensor_with_nan: str | None) -> Path:
        """Write this rank's file; rank 0 completes the checkpoint once it has the checksums of all ranks' files."""
        sums = draft.path / SUMS
        if self.claim is not None:
            self.claim.require()
        for folder in (draft.path / RANKS, sums):
            folder.mkdir(parents=True, exist_ok=True)
        answer: list[Any] = [NAN, tensor_with_nan, 0]
        if tensor_with_nan is None:
            path = write_state(draft.path / RANKS / f"rank-{self._rank}", snapshot)
            answer = [path.name, *measure(path)]
        write_beside(sums / str(self._rank), json.dumps(answer), mode=None)
        if self._rank != 0:
            if tensor_with_nan is not None:
                raise nan_error(tensor_with_nan)
            return draft.place
        give_up = time.monotonic() + SHARDS_WAIT_S
        while missing := [rank for rank in range(draft.meta.world_size) if not (sums / str(rank)).exists()]:
            if time.monotonic() > give_up:
                raise TimeoutError(0, f"rank {missing[0]} has not written its part in {SHARDS_WAIT_S:.0f} s")
            later = self._find_later_part(missing[0], draft.meta.step)
            if later is not None and not (sums / str(missing[0])).exists():
                raise TimeoutError(
                    0, f"rank {missing[0]} has saved step {later} instead: all ranks save after the same steps"
                )
            time.sleep(POLL_S)
        lines = [json.loads((sums / str(rank)).read_text()) for rank in range(draft.meta.world_size)]
        for rank, (name, tensor, _) in enumerate(lines):
            if name == NAN:
                draft.discard()
                raise nan_error(f"{tensor} of rank {rank}")
        place = draft.complete({f"{RANKS}/{name}": (size, crc) for name, size, crc in lines})
        shutil.rmtree(place / SUMS, ignore_errors=True)  # not before: if this fails, the next try needs them
        return place

    def _find_later_part(self, rank: int, step: int) -> int | None:
        """Return the last step after `step` with a part of `rank`; that rank will write no earlier part any more."""
        drafts = (place.parents[1].name for place in self.folder.glob(f".step-*.{self.owner}/{SUMS}/{rank}"))
        numbers = [int(name.removeprefix(".step-").partition(".")[0]) for name in drafts]
        return max((number for number in numbers if number > step), default=None)


def nan_error(tensor: str) -> LossNotFinite:
    return LossNotFinite(f"{tensor} has NaN", hint="save(..., allow_nan=True) writes a state in which that is meant")


def read_state(place: Path, meta: CheckpointMeta, *, rank: int, own: bool, world_size: int) -> Any:
    """The state, or the part of `rank`. Raises BadCheckpoint.

    `own`: this rank's own part, which there is only in a world of the same size.
    """
    if not (place / RANKS).is_dir():
        return _read_file(place / STATE)
    if own and meta.world_size != world_size:
        raise BadCheckpoint(
            f"{place} has the parts of {meta.world_size} ranks, and this world has {world_size}",
            hint="Run.load(rank=N) reads the part of one of them",
        )
    if not 0 <= rank < meta.world_size:
        raise BadCheckpoint(f"{place} has no part of rank {rank}: the ranks are 0 to {meta.world_size - 1}")
    return _read_file(place / RANKS / f"rank-{rank}")


def await_complete(folder: Path, step: int, *, within_s: float) -> bool:
    """Whether the checkpoint of `step` became complete in time."""
    give_up = time.monotonic() + within_s
    manifest = folder / f"step-{step:08d}" / MANIFEST
    while not os.path.exists(manifest):
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)
    return True


class ScriptCheckpoints(CheckpointKeeper):
    """The checkpoints of a run: chooses one to resume from, and saves new ones.

    Attributes:
        resumed_step: finished steps of the checkpoint that was chosen; 0 without one.
        saved_step: steps that are saved, or being written.
    """

    def __init__(
        self,
        folder: Path,
        env: DistEnv,
        *,
        attempt: str,
        keep: int,
        step: int | None,
        control: JobControl,
        report: Callable[[str], None],
        record: Callable[[int, float], None],
        step_s: Callable[[], Sequence[float]],
    ) -> None:
        """`step`: the step at which a program resumes if it loads its checkpoints itself; no checkpoint is chosen."""
        self._folder, self._env, self._attempt = folder, env, attempt
        self._of_program = step is not None
        if env.rank == 0:
            for left in folder.glob(".step-*"):  # incomplete checkpoints of earlier starts
                if not left.name.endswith(f".kit-{attempt}"):
                    shutil.rmtree(left, ignore_errors=True)
        for left in folder.glob(f".step-*/{SUMS}/{env.rank}"):
            left.unlink(missing_ok=True)
        self._chosen = self._choose(report) if step is None else None
        self.resumed_step = step if step is not None else 0 if self._chosen is None else self._chosen[1].step
        self.saved_step = self.resumed_step
        on_written = control.record_saved_step
        writer = StateWriter(folder, keep=keep, rank=env.rank, attempt=attempt, on_written=on_written)
        super().__init__(writer, control, record=record, step_s=step_s)

    def _choose(self, report: Callable[[str], None]) -> tuple[Path, CheckpointMeta] | None:
        """The newest sound checkpoint; where torch's processes have met, rank 0 alone looks through them."""
        store = find_store(f"resumed/{self._attempt}")
        if store is None or self._env.rank == 0:
            newest = checkpoints.resume_from(self._folder, report=report)
            if store is not None:
                store.write("chosen", "" if newest is None else newest.name)
            name = "" if newest is None else newest.name
        else:
            name = store.await_text("chosen")
        if not name:
            return None
        meta = checkpoints.find_meta(self._folder / name)
        if meta is None:
            raise _folder_error(f"rank 0 resumes from {self._folder / name}, which rank {self._env.rank} does not see")
        return self._folder / name, meta

    def resume_at(self, step: int) -> None:
        """Set the step at which the program resumes."""
        self.resumed_step = self.saved_step = step

    def load(self, rank: int | None) -> Any:
        """The state that was chosen, or None; of a sharded one the part of `rank`, or of this rank."""
        self._refuse_other_step()
        if self._chosen is None:
            return None
        place, meta = self._chosen
        return read_state(
            place,
            meta,
            rank=self._env.rank if rank is None else rank,
            own=rank is None,
            world_size=self._env.world_size,
        )

    def _refuse_other_step(self) -> None:
        env, step = self._env, self.resumed_step
        store = find_store(f"loaded/{self._attempt}")
        if store is None or env.world_size == 1:
            return
        if env.rank == 0:
            store.write("step", str(step))
        elif (of_first := store.await_text("step")) != str(step):
            raise _folder_error(f"rank 0 resumes at step {of_first}, rank {env.rank} at step {step}")

    def finish(self) -> None:
        """Wait until the newest checkpoint is on disk; the other ranks wait for rank 0. Raises StorageFault."""
        within_s = self._control.last_save_s
        super().finish()
        if self._env.rank != 0 and self.saved_step > self.resumed_step and not self._of_program:
            await_complete(self._folder, self.saved_step, within_s=within_s)  # rank 0 reports a failure


def _folder_error(problem: str) -> WorldMismatch:
    return WorldMismatch(
        f"{problem} (on {socket.gethostname()})", hint="the run folder must be on a file system that all hosts share"
    )
