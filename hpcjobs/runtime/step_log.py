"""Writes metrics.jsonl, with time per step and throughput, and makes the summary of a script from it.

`add` stores its values; at most once a second, all stored values become lines. Values that a device still computes are
read then, so that a step does not wait for the device.

Throughput, as of the trainers: the work of all ranks over the time of the steps that did it, without evaluations,
checkpoints (`exclude`) and the first steps.

A thread copies the lines to trackers: neither a slow server nor a broken one holds up a step.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import platform
import queue
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcjobs.record import METRICS
from hpcjobs.record.metrics import SCHEMA as METRICS_SCHEMA
from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.summary import Quantiles, RunSummary, Throughput, format_utc
from hpcjobs.record.values import decode_object, encode_object, restore
from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.exits import ExitCode, UsageError, print_error
from hpcjobs.trackers import TRACKERS, TrackedRun, Tracker, read_point

FLUSH_S = 1.0
WINDOW = 1000
"""So many of the newest steps are judged while a run goes on: the cost must not grow with its length."""
COUNTS = ("tokens", "samples", "images")
"""Counts of this rank since the previous line; the first one that is logged gives the throughput."""
OWN_KEYS = ("loss", "lr")
WARMUP = 2
"""So many first lines, of a trainer steps, are left out of the summary, if there are more: they compile and allocate,
and DDP rebuilds its buckets after the first one."""


def read_number(name: str, value: Any, method: str = "log") -> Any:
    """`value`, if it is a number, or may become one when it is read. Raises TypeError, which names the key."""
    if isinstance(value, (int, float)):
        return value
    if hasattr(value, "detach"):  # a tensor
        if value.numel() != 1:
            raise TypeError(f"{method}(): {name} is a tensor of shape {tuple(value.shape)}, expected one number")
        return value.detach().clone() if value.device.type != "cpu" else value.item()
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):  # an array
        value = value.item()
    if hasattr(value, "__float__") and not isinstance(value, str):
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{method}(): {name} is no single number: {error}") from error
    raise TypeError(f"{method}(): {name} is {_describe(value)}, expected a number")


def read_step(step: Any, method: str) -> int:
    """`step` as an int. Raises TypeError or ValueError, which names the method of `Run` that was called."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(
            f"{method}(): step is a {type(step).__name__} ({step!r}), expected a whole number of finished steps"
        ) from error
    if number < 0:
        raise ValueError(f"{method}(): step is {number}, expected 0 or more finished steps")
    return number


def _describe(value: object) -> str:
    text = repr(value)
    return f"a {type(value).__name__} ({text if len(text) <= 40 else text[:37] + '...'})"


class RunLog:
    """metrics.jsonl of a run, from its `run` line on, and the trackers that get a copy of it."""

    def __init__(
        self, run_dir: Path, head: Mapping[str, object], *, keep_bytes: int, trackers: Trackers | None = None
    ) -> None:
        """`keep_bytes`: bytes of an existing file to keep, the lines up to the step at which the run resumes."""
        self._began, self._trackers = time.perf_counter(), trackers
        copy_to = None if trackers is None else trackers.copy
        self._file = MetricsLog(run_dir / METRICS, keep_bytes=keep_bytes, copy_to=copy_to, report=print_error)
        self._file.write("run", time_s=0.0, schema=METRICS_SCHEMA, **head)

    def write(self, kind: str, **values: object) -> None:
        """Append a line with the time since the log was opened."""
        self._file.write(kind, time_s=round(time.perf_counter() - self._began, 6), **values)

    def append(self, lines: str) -> None:
        """Append complete lines."""
        self._file.append(lines)

    def tell(self) -> int:
        """Bytes of the file with all lines."""
        return self._file.tell()

    def close(self) -> None:
        """Close trackers and file. Raises the OSError that keeps lines from the file."""
        if self._trackers is not None:
            self._trackers.close()
        self._file.close()


class StepLog:
    """Rank 0 writes; the others keep the values for the summary."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        env: DistEnv,
        first_step: int,
        total_steps: int | None,
        log_to: Sequence[str] = (),
    ) -> None:
        self.name, self.world_size, self.first_step, self.total_steps = name, env.world_size, first_step, total_steps
        self.step = first_step
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        """The newest value of each metric of the script's own."""
        self.unit: str | None = None
        self.step_s: deque[float] = deque(maxlen=WINDOW)
        """Seconds per step, of the newest lines; the first ones left out."""
        self._pending: list[tuple[int, float, float, dict[str, Any]]] = []
        self._excluded_s = 0.0
        self.started_at, self._began = time.time(), time.perf_counter()
        self._flush_at = 0.0
        self._lines = 0
        self._last: tuple[int, float] = (first_step, self._began)
        self._work = {True: (0.0, 0.0), False: (0.0, 0.0)}
        """Counted work and its seconds; True: of the first lines."""
        self._path = folder / METRICS if env.rank == 0 else None
        self._head = {
            "workload": name,
            "world_size": env.world_size,
            "total_steps": total_steps,
            "resumed_from_step": first_step or None,
        }
        self._log: RunLog | None = None  # opened with the first line
        self._log_to = tuple(log_to)

    def add(self, step: int, values: dict[str, Any]) -> bool:
        """Keep a line; whether lines were written."""
        now = time.perf_counter()
        self.step = step
        self._pending.append((step, now, now - self._excluded_s, values))
        if now < self._flush_at:
            return False
        self._flush_at = now + FLUSH_S
        self.flush()
        return True

    def exclude(self, seconds: float) -> None:
        """Time since the newest line that belongs to no step: of an evaluation, or of a checkpoint."""
        self._excluded_s += seconds

    def flush(self) -> None:
        """Have every line in the file."""
        pending, self._pending = self._pending, []
        if pending:
            self._append("".join(self._make_line(*line) for line in pending))

    def _make_line(self, step: int, now: float, worked: float, values: Mapping[str, Any]) -> str:
        """`worked` is the time `now` without the excluded time."""
        last_step, last = self._last
        steps, took = step - last_step, worked - last
        self._last = step, worked
        self._lines += 1
        line: dict[str, Any] = {"kind": "step", "time_s": round(now - self._began, 6), "step": step}
        metrics: dict[str, float] = {}
        for key, value in values.items():
            number = value if isinstance(value, (int, float)) else float(value)
            if key == "epoch":
                line["epoch"] = int(number)
            elif key in OWN_KEYS:
                line[key] = number
            else:
                metrics[key] = number
        self.loss = line.get("loss", self.loss)
        count = next((key for key in COUNTS if key in metrics), None)
        if steps > 0 and took > 0:
            line["step_time_s"] = took / steps
            if self._lines > WARMUP:
                self.step_s.append(took / steps)
            if count is not None:
                self.unit = f"{count}/s"
                done = metrics.pop(count) * self.world_size
                line["throughput"], line["unit"] = done / took, self.unit
                counted, counted_s = self._work[self._lines <= WARMUP]
                self._work[self._lines <= WARMUP] = counted + done, counted_s + took
        if metrics:
            line["metrics"] = metrics
            self.metrics |= {key: value for key, value in metrics.items() if key not in COUNTS}
        return encode_object(line) + "\n"

    @property
    def throughput(self) -> float | None:
        """Work of all ranks per second of steps, without the first lines if there are more; None: none was counted."""
        counted, counted_s = self._work[False] if self._work[False][1] else self._work[True]
        return counted / counted_s if counted_s else None

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def write(self, kind: str, **values: object) -> None:
        """Write a line of another kind, after the logged ones."""
        self.flush()
        line = {"kind": kind, "time_s": round(self.elapsed_s, 6), **values}
        self._append(encode_object(line) + "\n")

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        if self._log is None:
            keep_bytes = _bytes_until(self._path, self.first_step)
            run = TrackedRun(self._path.parent, self.name, self.first_step, self._head)
            trackers = open_trackers(self._log_to, run, report=partial(print, flush=True))
            self._log = RunLog(self._path.parent, self._head, keep_bytes=keep_bytes, trackers=trackers)
        self._log.append(text)

    def tell(self) -> int:
        """Bytes of the file with all that was logged."""
        self.flush()
        return 0 if self._log is None else self._log.tell()

    def close(self) -> None:
        self.flush()
        self._path = None
        if self._log is not None:
            self._log.close()


def _bytes_until(path: Path, step: int) -> int:
    """Return the bytes of lines up to `step`, which a run that resumes there keeps."""
    size = 0
    if step == 0 or not path.exists():
        return 0
    with path.open("rb") as file:
        for line in file:
            try:
                later = (decode_object(line) or {}).get("step", 0) > step
            except (ValueError, TypeError):  # cut short by a crash
                return size
            if later:
                return size
            size += len(line)
    return size


def make_summary(
    log: StepLog,
    *,
    stall_s: Sequence[float],
    results: Mapping[str, Any],
    code: int = ExitCode.OK,
    error: str | None = None,
) -> RunSummary:
    """The summary after the newest step of `log`; `error` is the message of a run that failed with exit code `code`."""
    nodes = os.environ.get("HPCJOBS_NNODES", "")
    loss = results.get("loss", log.loss)
    torch = sys.modules.get("torch")
    return RunSummary(
        trainer=log.name,
        strategy=log.name,
        workload=log.name,
        status="completed" if error is None else "failed",
        exit_code=int(code),
        error=error,
        world_size=log.world_size,
        nnodes=int(nodes) if nodes.isdigit() else None,
        job_id=os.environ.get("HPCJOBS_JOB_ID"),
        started_at=format_utc(log.started_at),
        ended_at=format_utc(time.time()),
        elapsed_s=log.elapsed_s,
        python_version=platform.python_version(),
        torch_version=None if torch is None else str(torch.__version__),
        steps=log.step,
        resumed_from_step=log.first_step or None,
        throughput=None if log.throughput is None or log.unit is None else Throughput(log.throughput, log.unit),
        step_time_s=Quantiles.of(tuple(log.step_s)),
        checkpoint_stall_s=Quantiles.of(stall_s),
        memory_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        loss=loss if isinstance(loss, (int, float)) else None,
        results={**log.metrics, **results},
    )


def read_result(key: str, value: Any) -> Any:
    """`value` in JSON's types. Raises TypeError, which names the key."""
    if hasattr(value, "detach") or (hasattr(value, "__float__") and not isinstance(value, (int, float, str))):
        number = float(read_number(key, value, "finish"))
        return int(number) if hasattr(value, "__index__") and number.is_integer() else number
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [read_result(f"{key}[{n}]", item) for n, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: read_result(f"{key}.{name}", item) for name, item in value.items()}
    raise TypeError(f"finish(): {key} is a {type(value).__name__}, expected numbers, text, lists or dicts of them")


LAST_LINES_S = 60.0
"""A run that ends waits this long for its last lines to be copied."""


def require_trackers(names: Sequence[str]) -> None:
    """Raise `UsageError` where a name is not of a tracker, or its package is missing."""
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"log_to: {name!r} is no tracker", hint=f"there are {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"metrics for {name} need its package", hint=f"pip install 'hpcjobs[{name}]'")


def open_trackers(names: Sequence[str], run: TrackedRun, *, report: Callable[[str], None]) -> Trackers | None:
    """The trackers of these names; `report` gets a line about where each writes. None without names."""
    return Trackers(names, run, report) if names else None


class Trackers:
    """Trackers are opened by the thread too: their packages take seconds to load.

    One that fails is left out from then on, with a warning.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, report: Callable[[str], None]) -> None:
        self._run, self._report = run, report
        self._began_at = time.time()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complete = False
        self._thread = threading.Thread(target=self._copy_all, args=(tuple(names),), name="trackers", daemon=True)
        self._thread.start()

    def copy(self, lines: str) -> None:
        """Lines that were written to metrics.jsonl."""
        self._lines.put(lines)

    def close(self) -> None:
        """Wait until the last lines are copied, for a limited time."""
        self._lines.put(None)
        self._thread.join(LAST_LINES_S)
        if self._thread.is_alive():
            print_error(f"warning: trackers did not take the last lines of metrics in {LAST_LINES_S:.0f} s")

    def _copy_all(self, names: Sequence[str]) -> None:
        trackers: dict[str, Tracker] = {}
        for name in names:
            self._attempt(name, trackers, partial(self._open, name, trackers))
        ended = False
        while not ended:
            texts = [self._lines.get()]
            while not self._lines.empty():
                texts.append(self._lines.get())
            ended = None in texts
            lines = [restore(json.loads(line)) for text in texts if text for line in text.rstrip("\n").split("\n")]
            self._complete |= any(line["kind"] == "end" for line in lines)
            read = (read_point(line, began_at=self._began_at) for line in lines)
            points = [point for point in read if point is not None]
            for name, tracker in list(trackers.items()) if points else ():
                self._attempt(name, trackers, partial(tracker.write, points))
        for name, tracker in list(trackers.items()):
            self._attempt(name, trackers, partial(tracker.close, complete=self._complete))

    def _open(self, name: str, trackers: dict[str, Tracker]) -> None:
        trackers[name] = TRACKERS[name](self._run)
        self._report(f"metrics also go to {name}: {trackers[name].place}")

    def _attempt(self, name: str, trackers: dict[str, Tracker], action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever its package or its server raises: the run goes on, and its file has all
            trackers.pop(name, None)
            print_error(f"warning: no more metrics go to {name}: {type(error).__name__}: {error}")
