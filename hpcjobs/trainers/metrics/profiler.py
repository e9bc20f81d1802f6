"""`--profile START:STOP`: a torch profiler trace of some steps. `--memory-snapshot`: the history of a GPU's memory.

profile/rank-N.json.gz    for chrome://tracing or Perfetto
memory/rank-N.pickle      for pytorch.org/memory_viz
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpcjobs.runtime.exits import UsageError, print_error
from hpcjobs.trainers.commandline.flags import StepRange
from hpcjobs.trainers.distributed.process_group import RankGroup

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

    Raises:
        UsageError: the ranks have no GPU.
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
