"""``metrics.jsonl``: the progress of a run, an object per line.

Rank 0 of a trainer, or of a script with `hpcjobs.runtime`, appends to it. A run that resumes from a checkpoint cuts the
file behind that checkpoint, and continues with a ``run`` line. Any program may write one: readers take the lines they
know.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from hpcjobs.files import AnyPath, open_regular
from hpcjobs.record.values import decode_kind, encode_object

SCHEMA = "hpcjobs.metrics/1"
MOST_STEPS = 2**63 - 1


class RunLine(NamedTuple):
    """A start of the run."""

    time_s: float | None = None
    """0: each start counts from 0."""
    schema: str | None = None
    """``hpcjobs.metrics/1``."""
    workload: str | None = None
    """Name of the workload or script."""
    world_size: int | None = None
    """Ranks."""
    hosts: tuple[str, ...] | None = None
    """Host by rank; not written by scripts."""
    global_batch_size: int | None = None
    """Samples of a step on all ranks; not written by scripts."""
    total_steps: int | None = None
    """Steps of the complete run; 0: not known."""
    resumed_from_step: int | None = None
    """Finished steps of the checkpoint; written by scripts."""


class StepLine(NamedTuple):
    """Progress: means since the line before (`--log-every`)."""

    step: int
    """Finished steps."""
    time_s: float | None = None
    """Seconds since the start of the run."""
    epoch: int | float | None = None
    """From 0."""
    loss: float | None = None
    """Mean of all ranks; a script logs the loss of rank 0."""
    lr: float | None = None
    """Learning rate of the last step."""
    step_time_s: float | None = None
    """Of rank 0."""
    step_time_max_s: float | None = None
    """Step time of the slowest rank."""
    data_wait_s: float | None = None
    """The part of a step spent waiting for its batch, on rank 0."""
    data_wait_max_s: float | None = None
    """On the rank that waited longest."""
    data_wait_max_rank: int | None = None
    """That rank."""
    throughput: float | None = None
    """Work of all ranks per second."""
    unit: str | None = None
    """Its unit, such as ``images/s``."""
    metrics: dict[str, Any] | None = None
    """``gradient_norm``, and metrics of a [workload of your own](own_workload.md) or a script."""


class EvaluationLine(NamedTuple):
    """An evaluation of the held-out part; each prediction counts once."""

    step: int
    time_s: float | None = None
    epoch: int | float | None = None
    loss: float | None = None
    accuracy: float | None = None
    """Share of correct predictions."""
    predictions: int | None = None
    """Their number."""
    perplexity: float | None = None
    """Of language models."""
    metrics: dict[str, Any] | None = None
    """Metrics of a workload of your own."""


class EpochLine(NamedTuple):
    """A trainer has ended an epoch that it began in this attempt."""

    step: int
    time_s: float | None = None
    epoch: int | float | None = None
    epoch_s: float | None = None
    """Seconds of the epoch, with its evaluations and checkpoints."""
    evaluation_share: float | None = None
    """The part of it spent in evaluations, 0 to 1."""
    data_wait_share: float | None = None
    """The part of it that rank 0 spent waiting for batches, 0 to 1."""


class CheckpointLine(NamedTuple):
    """A checkpoint was written."""

    step: int
    time_s: float | None = None
    stall_s: float | None = None
    """How long saving held up training."""


class EndLine(NamedTuple):
    """The run has ended."""

    step: int
    time_s: float | None = None
    elapsed_s: float | None = None
    """Seconds of training and evaluation."""


class FigureLine(NamedTuple):
    """A figure of merit that was read from the job's log."""

    name: str
    value: float
    unit: str = ""
    time_s: float | None = None


Line = FigureLine | RunLine | StepLine | EvaluationLine | EpochLine | CheckpointLine | EndLine
LINES: dict[str, type[Line]] = {
    "run": RunLine, "step": StepLine, "evaluation": EvaluationLine, "checkpoint": CheckpointLine, "end": EndLine,
    "epoch": EpochLine, "figure": FigureLine,
}  # fmt: skip
"""The types of lines by their ``kind``."""


def decode_step(line: bytes) -> StepLine | None:
    """A step; None: another line, one that is cut short, or an impossible number."""
    step = decode_kind(line, "step", StepLine)
    return step if step is not None and 0 <= step.step <= MOST_STEPS else None


def decode_figure(line: bytes) -> FigureLine | None:
    """A figure of the log; None: another line, or one that is cut short."""
    return decode_kind(line, "figure", FigureLine)


def decode_run(line: bytes) -> RunLine | None:
    """A start of the run; None: another line, or one that is cut short."""
    run = decode_kind(line, "run", RunLine) if b'"run"' in line else None
    if run is not None and not 0 <= (run.total_steps or 0) <= MOST_STEPS:
        return run._replace(total_steps=None)
    return run


def read_lines(path: AnyPath) -> Iterator[bytes]:
    """The complete lines: the last one may be in the writing. Raises OSError."""
    with open_regular(path) as file:
        yield from (line for line in file if line.endswith(b"\n"))


class MetricsLog:
    """Appends one JSON object per line, and flushes each, so that a killed run keeps its lines."""

    def __init__(
        self,
        path: Path,
        *,
        keep_bytes: int = 0,
        copy_to: Callable[[str], None] | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`keep_bytes` of an existing file stay: those written before the resumed checkpoint. `copy_to` gets new lines.

        A file that a crash cut short keeps its complete lines: to grow it would fill the hole with zero bytes.
        """
        self._path, self._keep_bytes, self._copy_to = path, keep_bytes, copy_to
        self._report = report or _print_error
        self._file: FileIO | None = None
        self._unwritten = b""
        self.failure: OSError | None = None
        self.append("")

    def _open(self) -> FileIO:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._keep_bytes:
            self._report(
                f"warning: {self._path} has {size} bytes, and had {self._keep_bytes} bytes when the checkpoint was "
                "written: the lines between are lost"
            )
            self._keep_bytes = self._path.read_bytes().rfind(b"\n") + 1 if size else 0
        if size:
            os.truncate(self._path, self._keep_bytes)
        return FileIO(self._path, "ab")

    def write(self, kind: str, **values: object) -> None:
        """Append a line."""
        self.append(encode_object({"kind": kind, **values}) + "\n")

    def append(self, lines: str) -> None:
        """Append lines. After a failed write they are kept and written with the next ones."""
        self._unwritten += lines.encode()
        if self._copy_to is not None and lines:
            self._copy_to(lines)
        try:
            self._file = self._file or self._open()
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self.failure = None
        except OSError as error:
            if self.failure is None:
                self._report(f"warning: {self._path} can't be written: {error.strerror}")
            self.failure = error

    def tell(self) -> int:
        """Bytes of the file once everything is in it."""
        size = self._keep_bytes if self._file is None else os.fstat(self._file.fileno()).st_size
        return size + len(self._unwritten)

    def close(self) -> None:
        """Raises the OSError that keeps lines from the file."""
        if self._file is not None:
            self._file.close()
        if self._unwritten and self.failure is not None:
            raise self.failure


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader of standard error has ended
        print(text, file=sys.stderr, flush=True)
