"""`--profile START:STOP`: a torch profiler trace of some steps. `--memory-snapshot`: the history of a GPU's memory.

profile/rank-N.json.gz    for chrome://tracing or Perfetto
memory/rank-N.pickle      for pytorch.org/memory_viz

`Probe` measures exposed communication: how long a step waits for gradients of other ranks, in passes that do not train.
A window is one forward and backward pass over the batch just trained on, from a common start of all ranks.
Windows come in pairs, one that synchronises gradients and one that does not, in alternating order;
exposed communication is the difference. Gradients of a window are dropped, and buffers (such as BatchNorm's) and
random generators are restored, so the measurement does not change training.
A pass without communication needs complete weights: if weights are sharded, windows run only if all ranks have
the memory.
A negative value is noise, and is kept as such.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hpcjobs.runtime.exits import UsageError, print_error
from hpcjobs.trainers.checkpoint import own_generators, set_own_generators
from hpcjobs.trainers.config import StepRange
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.optimization import Stepper
from hpcjobs.trainers.workloads.base import Batch

PROFILES, SNAPSHOTS = "profile", "memory"
SHOWN_OPERATORS = 10
HISTORY_ENTRIES = 100_000


class StepProfiler:
    """Profiles the steps after step `start` up to step `stop`; off without a range."""

    def __init__(self, steps: StepRange | None, group: RankGroup, run_dir: Path, *, first_step: int) -> None:
        self.steps, self.group, self.folder = steps, group, run_dir / PROFILES
        self._profile: profile | None = None
        if steps is not None and first_step >= steps.stop:
            group.log(f"--profile {steps}: the run begins at step {first_step}, so there is nothing to profile")
        self.start_if_due(first_step)

    def start_if_due(self, step: int) -> None:
        """Start the profile if the step after step `step` is in the range; the last call after a step."""
        if self._profile is None and self.steps is not None and self.steps.start <= step < self.steps.stop:
            activities = [ProfilerActivity.CPU]
            if self.group.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def stop_if_due(self, step: int) -> None:
        """Stop the profile if step `step` ends the range; the first call after a step."""
        if self._profile is not None and self.steps is not None and step >= self.steps.stop:
            self.close()

    def close(self) -> None:
        """Write the profile. If the storage fails, the trace is lost and the run continues."""
        if self._profile is None:
            return
        done, self._profile, self.steps = self._profile, None, None
        done.stop()
        try:
            self.folder.mkdir(exist_ok=True)
            done.export_chrome_trace(str(self.folder / f"rank-{self.group.rank}.json.gz"))
        except OSError as error:
            print_error(f"warning: rank {self.group.rank} can't write its profile: {error}")
        by = "self_cuda_time_total" if self.group.device.type == "cuda" else "self_cpu_time_total"
        table = done.key_averages().table(sort_by=by, row_limit=SHOWN_OPERATORS, max_name_column_width=40)
        self.group.log(f"operators of rank 0 by their own time; traces of all ranks: {self.folder}\n{table}")


@contextmanager
def record_memory(group: RankGroup, run_dir: Path, *, on: bool) -> Iterator[None]:
    """Record allocations inside, and write the snapshot at the end, also where memory ran out.

    Raises UsageError: the ranks have no GPU.
    """
    if not on:
        yield
        return
    if group.device.type != "cuda":
        raise UsageError("--memory-snapshot is of a GPU's memory, and this run is on CPUs", hint="leave it out")
    torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    try:
        yield
    finally:
        path = run_dir / SNAPSHOTS / f"rank-{group.rank}.pickle"
        try:
            path.parent.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        except OSError as error:
            print_error(f"warning: rank {group.rank} can't write its memory snapshot: {error}")
        group.log(f"memory snapshots of all ranks: {path.parent}")
        torch.cuda.memory._record_memory_history(enabled=None)


FIRST_STEP = 10  # warmed up, and soon enough for short runs
SPARE = 0.1  # of the free memory that stays free: allocators divide it into pieces


class Probe:
    """Measures how long a step waits for communication, after FIRST_STEP and every `every` steps; None: never."""

    def __init__(self, every: int | None, stepper: Stepper, group: RankGroup) -> None:
        able = stepper.strategy.quiet_passes and group.world_size > 1
        self.every = every if able else None
        self.stepper, self.group = stepper, group
        self.exposed_s: list[float] = []
        self.compute_s: list[float] = []
        """Of passes without communication, which wait for no other rank: differences between ranks show here."""

    def due(self, step: int) -> bool:
        return self.every is not None and (step == FIRST_STEP or step % self.every == 0)

    def measure(self, batch: Batch) -> None:
        """Run one pair of windows if all ranks have the memory; a collective call."""
        if not self.fits():
            self.every = None
            return
        generators = own_generators(self.group)
        buffers = [(buffer, buffer.clone()) for buffer in self.stepper.model.buffers()]
        order = (True, False) if len(self.exposed_s) % 2 else (False, True)
        window_s = {sync: self._window(batch, sync=sync) for sync in order}
        for buffer, before in buffers:
            buffer.copy_(before)
        set_own_generators(generators, self.group)
        self.stepper.take_metrics()  # of passes that do not count
        self.exposed_s.append(window_s[True] - window_s[False])
        self.compute_s.append(window_s[False])

    def fits(self) -> bool:
        """Whether every rank has the memory of a pass without communication; a collective call where one needs more."""
        stepper, group = self.stepper, self.group
        needed = stepper.strategy.quiet_pass_bytes(stepper.model)
        if needed == 0:
            return True
        short = needed - (1 - SPARE) * measure_free_bytes(group.device, group.env.local_world_size)
        most = float(group.max(torch.tensor(short, dtype=torch.float64, device=group.device)))
        if most > 0:
            group.log(
                f"exposed communication is not measured: complete weights and gradients are {needed / 1e9:.1f} GB, "
                f"{most / 1e9:.1f} GB more than a rank has free"
            )
        return most <= 0

    def _window(self, batch: Batch, *, sync: bool) -> float:
        stepper = self.stepper
        with nullcontext() if sync else stepper.strategy.quiet(stepper.model):
            self._await_device()
            self.group.barrier()
            began = time.perf_counter()
            stepper.backward(batch)
            if sync:
                stepper.strategy.after_backward(stepper.model)
            self._await_device()
            took = time.perf_counter() - began
        stepper.strategy.zero_grad(stepper.optimizer)
        return took

    def _await_device(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)


def measure_free_bytes(device: torch.device, local_world_size: int, *, cuda: Any = torch.cuda) -> float:
    """Return the bytes that this rank could allocate: on a GPU beyond its peak, on a CPU its share of the memory."""
    if device.type == "cuda":
        unused, _ = cuda.mem_get_info(device)
        return float(unused + cuda.memory_reserved(device) - cuda.max_memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / local_world_size
