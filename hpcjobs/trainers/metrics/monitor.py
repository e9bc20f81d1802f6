"""Samples the machine's load during a run: once a second, by one rank of each node.

Node 0 writes monitor.jsonl, node N monitor-N.jsonl: lines that several hosts append to one file would mix.

GPUs are read by NVML, if it is installed: utilisation, memory, power and temperature.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.monitor import Head, Load, encode_head, encode_sample
from hpcjobs.record.names import monitor_name
from hpcjobs.record.summary import Monitored
from hpcjobs.runtime.exits import print_error
from hpcjobs.trainers.distributed.process_group import RankGroup

try:
    import pynvml
except ImportError:
    pynvml = None


class Gpus:
    """The GPUs of this node's ranks; `missing` is the reason if they cannot be read."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.missing: str | None = None
        self._handles: list[Any] = []
        if not uuids:
            self.missing = "the ranks use none"
        elif pynvml is None:
            self.missing = "the package nvidia-ml-py is not installed"
        else:
            self._open(sorted(set(uuids)))

    def _open(self, uuids: Sequence[str]) -> None:
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except pynvml.NVMLError as error:
            self.missing = f"NVML says: {error}"

    def read(self) -> dict[str, float | None]:
        """Read mean utilisation and hottest temperature of all GPUs, and the sums of memory and power."""
        handles = self._handles
        percents = _each(handles, lambda one: pynvml.nvmlDeviceGetUtilizationRates(one).gpu)
        memory = _each(handles, lambda one: pynvml.nvmlDeviceGetMemoryInfo(one).used)
        watts = _each(handles, lambda one: pynvml.nvmlDeviceGetPowerUsage(one) / 1e3)
        degrees = _each(handles, lambda one: pynvml.nvmlDeviceGetTemperature(one, pynvml.NVML_TEMPERATURE_GPU))
        return {
            "gpu_percent": sum(percents) / len(percents) if percents else None,
            "gpu_memory_bytes": sum(memory) if memory else None,
            "gpu_power_w": sum(watts) if watts else None,
            "gpu_temperature_c": max(degrees) if degrees else None,
        }


def _each(handles: Sequence[Any], ask: Callable[[Any], float]) -> list[float]:
    """Return the values of all devices that report one; a part of a GPU, for example, reports no utilisation."""
    answers = []
    for handle in handles:
        with suppress(pynvml.NVMLError):
            answers.append(float(ask(handle)))
    return answers


INTERVAL_S = 1.0
IDLE_PERCENT = 5.0  # below it, GPUs (where there are none, cores) count as idle


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
            ranks = cast(list[tuple[str, int, str | None]], self.group.gather((self.host, *self._own())))
            pids = [pid for host, pid, _ in ranks if host == self.host]
            uuids = [uuid for host, _, uuid in ranks if host == self.host and uuid is not None]
            if self.group.rank == self.group.hosts.index(self.host):
                sampler = LoadSampler(pids, Gpus(uuids))
                missing = sampler.gpus.missing if torch.version.hip is None else "NVML knows NVIDIA's alone"
                if missing is not None:
                    self.group.log(f"monitor: no GPU is watched: {missing}")
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

    def _own(self) -> tuple[int, str | None]:
        """This rank's process and GPU."""
        if self.group.device.type != "cuda" or torch.version.hip is not None:
            return os.getpid(), None
        return os.getpid(), f"GPU-{torch.cuda.get_device_properties(self.group.device).uuid}"

    def _watch(self, sampler: LoadSampler) -> None:
        node = list(dict.fromkeys(self.group.hosts)).index(self.host)
        log = MetricsLog(self.run_dir / monitor_name(node), report=print_error)
        began = time.time()
        log.append(encode_head(Head(self.host, began, INTERVAL_S)) + "\n")
        last = False
        while not last:
            last = self._done.wait(INTERVAL_S)  # the last, shorter interval counts too: short runs have no other
            sample = sampler.sample()
            self.samples.append(sample)
            log.append(encode_sample(time.time() - began, sample._asdict()) + "\n")
        log.close()


class LoadSampler:
    """Samples of the load by this node's ranks. Rates are means since the previous sample."""

    def __init__(self, pids: Sequence[int], gpus: Gpus) -> None:
        self.gpus = gpus
        self._ranks = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        self._cores = sorted({core for rank in self._ranks for core in rank.cpu_affinity()})
        psutil.cpu_percent(percpu=True)  # the first call begins the interval of the next one
        self._before, self._totals = time.perf_counter(), self._read_counters()

    def sample(self) -> Load:
        now, totals = time.perf_counter(), self._read_counters()
        passed = max(now - self._before, 1e-6)
        # Not below 0: a rank or an interface that ends takes its counters with it.
        rates = [max(0, new - old) / passed for new, old in zip(totals, self._totals, strict=True)]
        self._before, self._totals = now, totals
        busy = psutil.cpu_percent(percpu=True)
        cores = [busy[core] for core in self._cores if core < len(busy)] or busy
        return Load(
            cpu_percent=sum(cores) / len(cores),
            rss_bytes=float(sum(self._each(lambda rank: rank.memory_info().rss))),
            network_received_bytes_per_s=rates[0],
            network_sent_bytes_per_s=rates[1],
            read_bytes_per_s=rates[2],
            written_bytes_per_s=rates[3],
            **self.gpus.read(),
        )

    def _read_counters(self) -> list[float]:
        """Network of the node, loopback included, since ranks of one node talk there; storage of the ranks."""
        network = psutil.net_io_counters(nowrap=False)
        storage = self._each(lambda rank: rank.io_counters())
        received, sent = (0, 0) if network is None else (network.bytes_recv, network.bytes_sent)
        return [received, sent, sum(io.read_bytes for io in storage), sum(io.write_bytes for io in storage)]

    def _each(self, ask: Callable[[psutil.Process], Any]) -> list[Any]:
        """Return the values of the ranks that still run and may be read."""
        answers = []
        for rank in self._ranks:
            with suppress(psutil.Error, OSError):
                answers.append(ask(rank))
        return answers


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
