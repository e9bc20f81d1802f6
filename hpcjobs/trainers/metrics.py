"""Times steps, and records progress, metrics and the summary of a run; rank 0 writes.

On a GPU, CUDA events time the steps and are read in batches: a step's call returns long before the work is done.

The peak rate of a device's matrix units is the one that its vendor states: dense, in FLOP/s. Figures "with sparsity"
are halved here. docs/metrics.md has the sources by device.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from hpcjobs.node.monitor import IDLE_PERCENT, GpuReader, JobGroup, JobProcesses, NodeSampler, load_library
from hpcjobs.record import monitor_name
from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.monitor import END_LINE, Head, Load, encode_head, encode_sample
from hpcjobs.record.summary import ByRank, Evaluation, Monitored, Quantiles, RunSummary, Throughput, format_utc
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import LossNotFinite, print_error
from hpcjobs.runtime.step_log import WARMUP, WINDOW, RunLog, Trackers
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.optimization import TrainingPlan
from hpcjobs.trainers.workloads.base import Workload

MIG_SLICES = 7
"""Compute slices of a device that MIG divides (A100, H100, H200, GH200, B200); `MIG 3g.20gb` is three of them."""
MULTIPROCESSORS = ((r"A100", 108), (r"H100 PCIe", 114), (r"H100|H200|GH200", 132), (r"B200", 148))
"""Of complete devices. Slices have fewer than their share: seven of an A100 have 98."""


class Peak(NamedTuple):
    """TFLOP/s of products of this type, summed in fp32; None: the device has no units for them."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float


# By a pattern of the name that torch gives, the first that fits: other models of a family have other figures.
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"GB200", Peak(2500.0, 2500.0, 1250.0, 80.0)),
    (r"B200", Peak(2250.0, 2250.0, 1100.0, 75.0)),
    (r"GH200", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"H200 NVL", Peak(835.5, 835.5, 417.5, 60.0)),
    (r"H200", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"H100 PCIe", Peak(756.0, 756.0, 378.0, 51.0)),
    (r"H100 NVL", Peak(835.5, 835.5, 417.5, 60.0)),
    (r"H100", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"A100", Peak(312.0, 312.0, 156.0, 19.5)),
    (r"A10G", Peak(70.0, 70.0, 35.0, 35.0)),
    (r"A10", Peak(125.0, 125.0, 62.5, 31.2)),
    (r"L40S", Peak(362.05, 362.05, 183.0, 91.6)),
    (r"L4", Peak(121.0, 121.0, 60.0, 30.3)),
    (r"RTX 4090(?! (?:D|Laptop))", Peak(165.2, 165.2, 82.6, 82.6)),
    (r"RTX 4070(?! (?:Ti|SUPER|Laptop))", Peak(58.3, 58.3, 29.1, 29.1)),
    (r"V100-SXM2", Peak(125.0, None, None, 15.7)),
    (r"V100-PCIE", Peak(112.0, None, None, 14.0)),
    (r"T4", Peak(65.0, None, None, 8.1)),
    (r"MI300X", Peak(1307.4, 1307.4, 653.7, 163.4)),
    (r"MI250X", Peak(191.5, 191.5, None, 47.85)),  # of one die of two: torch sees each die as a device
)


def peak_flops_per_s(
    device_name: str, precision: str, *, tf32: bool, multiprocessors: int | None = None
) -> float | None:
    """The peak of one device or MIG slice, in the precision its matrix products run in; None where none is stated.

    Args:
        multiprocessors: visible to the process; their number gives the share of a MIG slice.
    """
    for pattern, peak in PEAKS:
        if re.search(rf"\b(?:{pattern})\b", device_name):
            by_tf32 = precision == "fp32" and tf32 and peak.tf32
            stated: float | None = getattr(peak, "tf32" if by_tf32 else precision)
            return None if stated is None else stated * _share(device_name, multiprocessors) * 1e12
    return None


def _share(device_name: str, multiprocessors: int | None) -> float:
    slices = re.search(r"\bMIG (?:\d+c\.)?(\d+)g\.", device_name)
    if slices is None:
        return 1.0
    complete = next((count for name, count in MULTIPROCESSORS if re.search(rf"\b(?:{name})\b", device_name)), None)
    if multiprocessors is None or complete is None:
        return int(slices[1]) / MIG_SLICES
    return multiprocessors / complete


@dataclass
class Meter:
    """Call `begin`, `data_ready`, `end` once per step."""

    device: torch.device
    step_s: array[float] = field(default_factory=lambda: array("d"))
    wait_s: array[float] = field(default_factory=lambda: array("d"))
    epoch_began: float | None = None
    """Start of the first step of the current epoch; None before that step."""
    epoch_first: int = 0
    """Steps before the current epoch."""
    _began: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def begin(self) -> None:
        self._began = time.perf_counter()
        if self.epoch_began is None:
            self.epoch_began, self.epoch_first = self._began, len(self.wait_s)
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            self._events.append((start, end))

    def data_ready(self) -> None:
        self.wait_s.append(time.perf_counter() - self._began)

    def end(self) -> None:
        if self.device.type == "cuda":
            self._events[-1][1].record()
        else:
            self.step_s.append(time.perf_counter() - self._began)

    def read_gpu_times(self) -> None:
        """Wait for the steps on the GPU, and read their times."""
        if self._events:
            torch.cuda.synchronize(self.device)
            self.step_s.extend(start.elapsed_time(end) / 1e3 for start, end in self._events)
            self._events.clear()

    @property
    def recent_steps(self) -> Sequence[float]:
        """The newest steady steps, at most WINDOW of them."""
        count = len(self.step_s)
        return self.step_s[max(WARMUP if count > WARMUP else 0, count - WINDOW) :]

    @property
    def counted_steps(self) -> Sequence[float]:
        """Times of the steps after the warm-up; of all steps if the run ends within the warm-up."""
        return self.step_s[WARMUP:] or self.step_s

    @property
    def counted_waits(self) -> Sequence[float]:
        return self.wait_s[WARMUP:] or self.wait_s


class EpochTime(NamedTuple):
    """Seconds of a complete epoch on this rank, with its evaluations and checkpoints, and two parts of them."""

    epoch_s: float
    evaluation_s: float
    data_wait_s: float


class Recorder:
    """Losses stay on the device until a line is due: then one small all-reduce averages them."""

    def __init__(
        self,
        group: RankGroup,
        plan: TrainingPlan,
        workload: Workload,
        run_dir: Path,
        *,
        resumed: CheckpointMeta | None,
        trackers: Trackers | None = None,
    ) -> None:
        self.group, self.plan, self.workload, self.run_dir = group, plan, workload, run_dir
        self.meter = Meter(group.device)
        self.loss: float | None = None
        self.evaluation: Evaluation | None = None
        self._evaluated_at: tuple[int, int] | None = None  # finished steps; bytes of metrics before the evaluation
        self._evaluation_s = 0.0  # of the current epoch
        self._epochs: list[EpochTime] = []
        self._pending: list[torch.Tensor] = []
        self._pending_metrics: dict[str, list[torch.Tensor]] = {}
        self._started = time.time()
        keep_bytes = 0 if resumed is None else resumed.metrics_bytes
        head = {"workload": workload.name, "world_size": group.world_size, "hosts": group.hosts,
                "global_batch_size": plan.global_batch_size, "total_steps": plan.total_steps}  # fmt: skip
        self._log = RunLog(run_dir, head, keep_bytes=keep_bytes, trackers=trackers) if group.rank == 0 else None
        self._first_step = 0 if resumed is None else resumed.step

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is not None:
            self._log.close()

    def add(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor] | None = None) -> None:
        """The mean loss of a step on this rank, and the workload's own metrics: the same names on all ranks."""
        self._pending.append(loss)
        for name, value in (metrics or {}).items():
            self._pending_metrics.setdefault(name, []).append(value)

    def flush(self, step: int, epoch: int) -> None:
        """Write the line of the steps since the last one; `step` counts finished steps."""
        if not self._pending:
            return
        steps = len(self._pending)
        self.meter.read_gpu_times()
        recent, waits = self.meter.step_s[-steps:], self.meter.wait_s[-steps:]
        mine = torch.stack(self._pending).double().mean(), sum(recent) / steps, sum(waits) / steps
        stacks = ([value.double() for value in values] for values in self._pending_metrics.values())
        own = [float(torch.stack(stack).mean()) if stack else math.nan for stack in stacks]
        losses, step_s, wait_s, *others = self.group.rows([*(float(value) for value in mine), *own]).unbind(1)
        metrics = {name: float(row.nanmean()) for name, row in zip(self._pending_metrics, others, strict=True)}
        mean = float(losses.mean())
        self._pending.clear()
        for values in self._pending_metrics.values():
            values.clear()
        if not math.isfinite(mean):
            raise LossNotFinite(
                f"the loss is {mean} at step {step} (epoch {epoch + 1})",
                hint="a smaller --lr, --warmup-steps, --clip-norm 1.0, or --precision bf16 instead of fp16",
            )
        self.loss = mean
        rate = self._rate(recent, last=step)
        self._write("step", step=step, epoch=epoch, loss=mean, lr=self.plan.lr_at(step - 1),
                    step_time_s=float(step_s[0]), step_time_max_s=float(step_s.max()),
                    data_wait_s=float(wait_s[0]), data_wait_max_s=float(wait_s.max()),
                    data_wait_max_rank=int(wait_s.argmax()), throughput=rate,
                    unit=f"{self.workload.unit}/s", **({"metrics": metrics} if metrics else {}))  # fmt: skip
        width = len(str(self.plan.total_steps))
        self.group.log(
            f"epoch {epoch + 1}/{self.plan.epochs}  step {step:>{width}}/{self.plan.total_steps}  "
            f"loss {mean:.4f}  {rate:,.0f} {self.workload.unit}/s  {1e3 * sum(recent) / steps:.1f} ms/step"
        )

    @contextmanager
    def time_evaluation(self) -> Iterator[None]:
        """Count the time inside as evaluation time of the current epoch."""
        began = time.perf_counter()
        yield
        if self.meter.epoch_began is not None:
            self._evaluation_s += time.perf_counter() - began

    def end_epoch(self, step: int, epoch: int) -> None:
        """Write the line of an epoch, after its evaluation and checkpoint; none if it began before this attempt."""
        meter, now = self.meter, time.perf_counter()
        began, meter.epoch_began = meter.epoch_began, None
        evaluation_s, self._evaluation_s = self._evaluation_s, 0.0
        if began is None or len(meter.wait_s) - meter.epoch_first != self.plan.steps_per_epoch:
            return
        took = EpochTime(now - began, evaluation_s, sum(meter.wait_s[meter.epoch_first :]))
        self._epochs.append(took)
        shares = took.evaluation_s / took.epoch_s, took.data_wait_s / took.epoch_s
        self._write("epoch", step=step, epoch=epoch, epoch_s=took.epoch_s, evaluation_share=shares[0],
                    data_wait_share=shares[1])  # fmt: skip
        self.group.log(
            f"epoch {epoch + 1}/{self.plan.epochs}  took {took.epoch_s:.1f} s: evaluation {shares[0]:.0%}, "
            f"data wait {shares[1]:.0%}"
        )

    def metrics_bytes_at(self, step: int) -> int:
        """Bytes of metrics that a run which goes on from `step` keeps: it repeats the evaluation of that step."""
        if self._evaluated_at is not None and self._evaluated_at[0] == step:
            return self._evaluated_at[1]
        return self._bytes

    @property
    def _bytes(self) -> int:
        return 0 if self._log is None else self._log.tell()

    def evaluation_at(self, step: int) -> Evaluation | None:
        """Return the evaluation after exactly `step` steps, if there was one."""
        return self.evaluation if self._evaluated_at is not None and self._evaluated_at[0] == step else None

    def record_checkpoint(self, step: int, stall_s: float) -> None:
        self._write("checkpoint", step=step, stall_s=stall_s)

    def record_evaluation(self, result: Evaluation, step: int, epoch: int) -> None:
        self.evaluation, self._evaluated_at = result, (step, self._bytes)
        self._write("evaluation", step=step, epoch=epoch, **asdict(result))
        extra = "" if result.accuracy is None else f"  accuracy {result.accuracy:.4f}"
        extra += "" if result.perplexity is None else f"  perplexity {result.perplexity:.3f}"
        extra += "".join(f"  {name} {value:.4g}" for name, value in result.metrics.items())
        self.group.log(
            f"epoch {epoch + 1}/{self.plan.epochs}  held out: loss {result.loss:.4f}"
            f"{extra}  ({result.predictions:,} predictions)"
        )

    def check_result(self) -> None:
        """Raise LossNotFinite if the loss of the evaluation after the last step is NaN or infinite."""
        last = self.evaluation_at(self.plan.total_steps)
        if last is not None and not math.isfinite(last.loss):
            raise LossNotFinite(
                f"the loss of the held-out part is {last.loss} after the last step, {self.plan.total_steps}",
                hint="are its samples finite? --precision fp32 shows whether the precision is the cause",
            )

    def finish(self, *, steps: int, precision: str, tf32: bool, compute_s: Sequence[float], **known: Any) -> RunSummary:
        """The summary, written by rank 0; the same value on every rank."""
        self.meter.read_gpu_times()
        meter, now = self.meter, time.time()
        ranks = by_rank(self.group, meter, compute_s)
        rate = self._rate(meter.counted_steps, last=steps)
        flops = self.workload.flops_per_sample
        flops_per_s = None if flops is None else rate / self.workload.units_per_sample * flops
        peak = self._peak(precision, tf32=tf32)
        summary = RunSummary(
            workload=self.workload.name,
            status="completed",
            exit_code=0,
            world_size=self.group.world_size,
            hosts=self.group.hosts,
            nnodes=len(set(self.group.hosts)),
            started_at=format_utc(self._started),
            ended_at=format_utc(now),
            elapsed_s=now - self._started,
            device=self.group.device.type,
            device_name=device_name(self.group.device),
            threads_per_rank=torch.get_num_threads(),
            torch_version=str(torch.__version__),
            python_version=platform.python_version(),
            epochs=self.plan.epochs_after(steps),
            steps=steps,
            samples=self.plan.samples_before(steps),
            batch_size_per_rank=self.plan.batch_size,
            global_batch_size=self.plan.global_batch_size,
            lr=self.plan.lr,
            throughput=Throughput(rate, f"{self.workload.unit}/s"),
            step_time_s=Quantiles.of(meter.counted_steps),
            data_wait_s=Quantiles.of(meter.counted_waits),
            by_rank=ranks,
            imbalance=ranks.imbalance,
            epoch_s=Quantiles.of([epoch.epoch_s for epoch in self._epochs]),
            evaluation_share=self._share_of_epochs("evaluation_s"),
            data_wait_share=self._share_of_epochs("data_wait_s"),
            memory_peak_bytes=self._memory_peak(),
            precision=precision,
            flops_per_s=flops_per_s,
            peak_flops_per_s=peak,
            mfu=None if peak is None or flops_per_s is None else flops_per_s / peak,
            loss=self.loss,
            evaluation=self.evaluation,
            **known,
        )
        self._write("end", step=steps, elapsed_s=summary.elapsed_s)
        if self._log is not None:
            summary.write(self.run_dir)
        return summary

    def _share_of_epochs(self, part: str) -> float | None:
        """Return a part's share of the time of all complete epochs; None without one."""
        total = sum(epoch.epoch_s for epoch in self._epochs)
        return sum(getattr(epoch, part) for epoch in self._epochs) / total if total > 0 else None

    def _rate(self, step_s: Sequence[float], *, last: int) -> float:
        """Units per second of all ranks, over the steps that end with step `last`."""
        if not step_s:
            return 0.0
        samples = self.plan.samples_before(last) - self.plan.samples_before(last - len(step_s))
        return samples * self.workload.units_per_sample / sum(step_s)

    def _peak(self, precision: str, *, tf32: bool) -> float | None:
        """Return the peak of all ranks, one device each; None on CPUs."""
        if self.group.device.type != "cuda":
            return None
        count = torch.cuda.get_device_properties(self.group.device).multi_processor_count
        one = peak_flops_per_s(device_name(self.group.device), precision, tf32=tf32, multiprocessors=count)
        return None if one is None else one * self.group.world_size

    def _memory_peak(self) -> int:
        if self.group.device.type == "cuda":
            mine = torch.cuda.max_memory_allocated(self.group.device)
        else:
            mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(self.group.max(torch.tensor(mine, device=self.group.device)))

    def _write(self, kind: str, **values: object) -> None:
        if self._log is not None:
            self._log.write(kind, **values)


def by_rank(group: RankGroup, meter: Meter, compute_s: Sequence[float]) -> ByRank:
    """The medians of every rank; a collective call."""
    mine = [Quantiles.of(values) for values in (meter.counted_steps, meter.counted_waits, compute_s)]
    medians = group.rows([math.nan if one is None else one.median for one in mine]).T.tolist()
    step_s, wait_s, alone_s = (None if any(map(math.isnan, row)) else tuple(row) for row in medians)
    return ByRank(step_time_s=step_s, data_wait_s=wait_s, compute_s=alone_s)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


INTERVAL_S = 1.0


class Monitor:
    """Samples while the `with` block runs, on the first rank of each node."""

    def __init__(self, group: RankGroup, run_dir: Path, *, on: bool) -> None:
        self.group, self.run_dir = group, run_dir
        self.on, self.host = on, group.hosts[group.rank]
        self.samples: list[Load] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Monitor:
        if self.on:
            gathered = cast(list[tuple[int, str | None]], self.group.gather((os.getpid(), self._find_uuid())))
            here = {rank: gathered[rank] for rank, host in enumerate(self.group.hosts) if host == self.host}
            if self.group.rank == min(here):
                sampler = self._make_sampler(here)
                self._thread = threading.Thread(target=self._watch, args=(sampler,), name="monitor", daemon=True)
                self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def summary(self) -> Monitored | None:
        """Summarise the samples of all nodes; a collective call."""
        if not self.on:
            return None
        self.__exit__()
        nodes = cast(list[list[Load]], self.group.gather(self.samples))
        return summed_up([sample for samples in nodes for sample in samples])

    def _find_uuid(self) -> str | None:
        """NVML's name of this rank's GPU."""
        if self.group.device.type != "cuda" or torch.version.hip is not None:
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.group.device).uuid}"

    def _make_sampler(self, here: dict[int, tuple[int, str | None]]) -> NodeSampler:
        uuids = sorted({uuid for _, uuid in here.values() if uuid is not None})
        gpus = GpuReader({"CUDA_VISIBLE_DEVICES": ",".join(uuids)}, load_library())
        if not len(gpus):
            reason = "the driver's NVML does not show them" if uuids else "NVML knows NVIDIA's alone"
            reason = "the ranks use none" if self.group.device.type != "cuda" else reason
            self.group.log(f"monitor: no GPU is watched: {reason}")
        gpus.are_held = self.group.device.type == "cuda"  # also GPUs that NVML does not know
        processes = JobProcesses(ranks={pid: rank for rank, (pid, _) in here.items()})
        return NodeSampler(processes, JobGroup(), gpus)

    def _watch(self, sampler: NodeSampler) -> None:
        node = list(dict.fromkeys(self.group.hosts)).index(self.host)
        log = MetricsLog(self.run_dir / monitor_name(node), report=print_error)
        began = time.time()
        log.append(encode_head(Head(self.host, began, INTERVAL_S, os.environ.get("HPCJOBS_JOB_ID"))) + "\n")
        last = False
        while not last:
            last = self._done.wait(INTERVAL_S)  # the last, shorter interval counts too: short runs have no other
            values = sampler.sample()
            self.samples.append(Load(**{name: values[name] for name in Load._fields}))
            log.append(encode_sample(time.time() - began, values) + "\n")
        log.append(END_LINE + "\n")
        log.close()


def summed_up(samples: Sequence[Load]) -> Monitored | None:
    """Means and peaks of each value over the samples that have it, and the share of idle samples."""
    if not samples:
        return None
    columns = {name: [getattr(sample, name) for sample in samples] for name in Load._fields}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    busy = known["gpu_percent"] or known["cpu_percent"]
    return Monitored(
        samples=len(samples),
        interval_s=INTERVAL_S,
        idle_share=sum(value < IDLE_PERCENT for value in busy) / len(busy),
        mean=Load(**{name: sum(values) / len(values) for name, values in known.items() if values}),
        peak=Load(**{name: max(values) for name, values in known.items() if values}),
    )
