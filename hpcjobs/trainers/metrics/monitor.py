"""Samples the machine's load during a run: once a second, by one rank of each node, with `node/monitor.py`.

Node 0 writes monitor.jsonl, node N monitor-N.jsonl: lines that several hosts append to one file would mix.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from hpcjobs.node.monitor import IDLE_PERCENT, GpuReader, JobGroup, JobProcesses, NodeSampler, load_library
from hpcjobs.record.metrics import MetricsLog
from hpcjobs.record.monitor import END_LINE, Head, Load, encode_head, encode_sample
from hpcjobs.record.names import monitor_name
from hpcjobs.record.summary import Monitored
from hpcjobs.runtime.exits import print_error
from hpcjobs.trainers.distributed.process_group import RankGroup

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
