"""Reads what a running job's trainer has written last into metrics.jsonl, from the end of the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from hpcjobs.files import open_regular, read_regular
from hpcjobs.record.names import METRICS
from hpcjobs.run.folder import output_dir
from hpcjobs.run.json_lines import decode_line, last_lines
from hpcjobs.units import human_bytes, human_duration

_MOST_STEPS = 2**63 - 1
_SPEED_LINES = 20
"""So many of the last lines tell the speed."""


class StepProgress(msgspec.Struct, frozen=True):
    """A `step` line of metrics.jsonl, as far as it is shown."""

    step: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)]
    epoch: int | float | None = None
    loss: float | None = None
    throughput: float | None = None
    unit: str | None = None
    time_s: float | None = None
    """Since the trainer's start."""
    diverged_at: int | None = None
    """The first step after the last finite loss, where the newest is none. None: the last lines do not show it."""

    def __str__(self) -> str:
        return self.describe(f"{self.step}")

    def describe(self, step: str) -> str:
        """All that is known, with ``step`` in the place of the number."""
        arguments = [f"step {step}"]
        arguments += [] if self.epoch is None else [f"epoch {self.epoch:g}"]
        arguments += [] if self.loss is None else [self.loss_text]
        arguments += [] if self.throughput is None else [f"{self.throughput:,.0f} {self.unit or ''}".rstrip()]
        return ", ".join(arguments)

    @property
    def loss_text(self) -> str:
        """``loss 0.1234``, or ``loss NaN since step 40``."""
        assert self.loss is not None
        value = "NaN" if math.isnan(self.loss) else f"{self.loss:.4g}"
        return f"loss {value}" + ("" if self.diverged_at is None else f" since step {self.diverged_at}")

    @property
    def has_diverged(self) -> bool:
        """The loss is NaN or infinite."""
        return self.loss is not None and not math.isfinite(self.loss)


class _RunLines(msgspec.Struct, frozen=True):
    """A `run` line of metrics.jsonl: a trainer has started here, or started again."""

    total_steps: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)] | None = None
    """0: not known, as None."""


class Progress(msgspec.Struct, frozen=True):
    """How far a trainer is, by the end of its metrics.jsonl."""

    step: StepProgress
    """The newest one."""
    losses: tuple[float, ...]
    """Of the last lines, oldest first, without those that are no number."""
    total_steps: int | None = None
    steps_per_s: float | None = None
    """Since the trainer's last start, over the last lines; None: one line is too few."""

    @property
    def share(self) -> float | None:
        """The part of all steps that is done, 0 to 1; None where the trainer did not write how many there are."""
        return min(1.0, self.step.step / self.total_steps) if self.total_steps else None

    @property
    def remaining_s(self) -> float | None:
        """How long the steps that are left take at the speed of the last ones."""
        if self.total_steps is None or not self.steps_per_s:
            return None
        return max(0, self.total_steps - self.step.step) / self.steps_per_s

    @property
    def of_total(self) -> str:
        """``120/1000``, or ``120`` where the number of steps is not known."""
        return f"{self.step.step}" if self.total_steps is None else f"{self.step.step}/{self.total_steps}"

    @property
    def time_left(self) -> str | None:
        """``3m20s left``; None: not known."""
        return None if self.remaining_s is None else f"{human_duration(self.remaining_s)} left"

    def __str__(self) -> str:
        return ", ".join([self.step.describe(self.of_total), *([] if self.time_left is None else [self.time_left])])


class StagingProgress(msgspec.Struct, frozen=True):
    """staging.json: how far the copies of `--stage-to` are; the node is the one furthest behind."""

    nodes: int
    ready: int
    host: str
    files: int
    files_total: int
    size_bytes: int
    total_bytes: int
    waits: bool = False

    def __str__(self) -> str:
        done, total = human_bytes(self.size_bytes), human_bytes(self.total_bytes)
        last = f"{self.host}: {self.files:,} of {self.files_total:,} files, {done} of {total}"
        last = f"{self.host} waits for another job's copy" if self.waits else last
        return f"copied to the nodes' disks: {self.ready} of {self.nodes} ready; {last}"


class RunLines:
    """The newest `run` line of each metrics.jsonl, wherever in it; each byte of a file is read once."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, _RunLines | None]] = {}
        """How much of the file was read, up to the end of a line, and what it had."""

    def newest(self, path: Path) -> _RunLines | None:
        """None: the file has none, or is not there."""
        position, run = self._known.get(path, (0, None))
        try:
            with open_regular(path) as file:
                if file.seek(0, 2) < position:  # begun anew
                    position, run = 0, None
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    run = (decode_line(line, _RunLines, kind="run") if b'"run"' in line else None) or run
        except OSError:
            return None
        self._known[path] = position, run
        return run


def newest_step(run_dir: Path) -> StepProgress | None:
    """The last `step` line; None before the first one."""
    lines = (decode_line(line, StepProgress, kind="step") for line in last_lines(run_dir / METRICS))
    all_steps = [step for step in lines if step is not None]
    return _newest(all_steps) if all_steps else None


def _newest(steps: list[StepProgress]) -> StepProgress:
    """The last of some lines, with the step at which its loss has diverged."""
    with_loss = [step for step in steps if step.loss is not None]
    finite = next((n for n in reversed(range(len(with_loss))) if not with_loss[n].has_diverged), None)
    if finite is None or not steps[-1].has_diverged:
        return steps[-1]
    return msgspec.structs.replace(steps[-1], diverged_at=with_loss[finite + 1].step)


def read_progress(run_dir: Path, run_lines: RunLines | None = None) -> Progress | None:
    """The progress by the last lines; None before the first step. ``run_lines`` spares who reads again most of it."""
    path = run_dir / METRICS
    lines = last_lines(path)
    all_steps: list[StepProgress] = []
    since_start: list[StepProgress] = []
    run = None
    for line in lines:
        if (step := decode_line(line, StepProgress, kind="step")) is not None:
            if since_start and step.step < since_start[-1].step:  # a program that counts anew without a `run` line
                since_start = []
            all_steps.append(step)
            since_start.append(step)
        elif (started := decode_line(line, _RunLines, kind="run")) is not None:
            run, since_start = started, []
    if not all_steps:
        return None
    run = run or (run_lines or RunLines()).newest(path)
    losses = tuple(step.loss for step in all_steps if step.loss is not None and math.isfinite(step.loss))
    return Progress(
        step=_newest(all_steps),
        losses=losses,
        total_steps=(run.total_steps or None) if run is not None else None,
        steps_per_s=_speed(since_start[-_SPEED_LINES:]),
    )


def job_progress(run_dir: str | None, job_id: str) -> Progress | None:
    """The progress of a job or array task; None: it writes none, or has no run folder."""
    return None if run_dir is None else read_progress(output_dir(Path(run_dir), job_id))


def read_staging(run_dir: Path) -> StagingProgress | None:
    """The progress of copying data; None: no copy is being made."""
    try:
        return msgspec.json.decode(read_regular(run_dir / "staging.json"), type=StagingProgress)
    except (OSError, ValueError):  # not there, or from a newer hpcjobs
        return None


def job_staging(run_dir: str | None, job_id: str) -> StagingProgress | None:
    """The progress of a job's or array task's copies."""
    return None if run_dir is None else read_staging(output_dir(Path(run_dir), job_id))


def _speed(steps: list[StepProgress]) -> float | None:
    if len(steps) < 2 or steps[0].time_s is None or steps[-1].time_s is None:
        return None
    passed = steps[-1].time_s - steps[0].time_s
    return (steps[-1].step - steps[0].step) / passed if passed > 0 else None
