"""What does the sampler of `hpcjobs monitor` cost a training in throughput?

    python benchmarks/sampler.py        eight minutes; SAMPLES=6 for half a minute

A training step by hand (a decoder layer, one thread) runs beside the sampler at its usual 5 s, both on one core, as
where the ranks use all cores. The 5 s around each sample have two halves: the one in the middle holds the sample, the
other one, a quarter before it and a quarter behind it, holds none. A speed that rises or falls steadily is the same in
both. A sample costs the throughput half of what the halves differ by. As a control, the half interval between two
samples, which holds none, is divided in the same way. The CPU time of the sampler is what the kernel counts.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import bootstrap, keep_samples, machine, parse_no_arguments
from torch import nn

from hpcjobs.packing import pack

JOB, INTERVAL_S = "4711", 5.0
SAMPLES = int(os.environ.get("SAMPLES", "96"))


def make_step() -> Callable[[], None]:
    """One training step of a decoder layer."""
    torch.set_num_threads(1)
    model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(2, 64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def train(duration_s: float) -> list[float]:
    """Train for so long; when each step ended, in seconds since 1970 as of the samples."""
    step, ends = make_step(), [time.time()]
    while ends[-1] - ends[0] < duration_s:
        step()
        ends.append(time.time())
    return ends


def read_sample_times(path: Path) -> list[float]:
    """When each sample was taken, in seconds since 1970."""
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    head = lines[0] if lines else {}
    return [head["started_at"] + line["time_s"] for line in lines if line["kind"] == "sample"]


def compare_halves(ends: Sequence[float], middle: float, length_s: float) -> float:
    """Steps in the middle half of a time, as times those in its first and last quarter."""

    def count_steps(moment: float) -> float:
        after = bisect_left(ends, moment)
        return after - (ends[after] - moment) / (ends[after] - ends[after - 1])

    begin, first, last, end = (count_steps(middle + part * length_s) for part in (-0.5, -0.25, 0.25, 0.5))
    return (last - first) / (end - begin - (last - first))


def report(name: str, overheads: Sequence[float]) -> None:
    """Print the median with its interval."""
    low, high = bootstrap(overheads)
    print(f"{name:34} {statistics.median(overheads):+.2%} (95 % interval {low:+.2%} to {high:+.2%})")


def cpu_s(pid: int) -> float:
    """CPU time of a process, to the nanosecond; psutil counts hundredths of a second."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> None:
    """Print the overhead, the control and the sampler's CPU time."""
    parse_no_arguments(__doc__)
    if os.environ.get("HPCJOBS_JOB_ID") != JOB:  # the sampler knows the job's ranks by their environment
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "HPCJOBS_JOB_ID": JOB, "RANK": "0"})
    measured_on = machine()
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    with TemporaryDirectory() as name:
        program, samples = Path(name) / "monitor.pyz", Path(name) / "monitor.jsonl"
        program.write_bytes(pack("hpcjobs.node.monitor"))
        arguments = [sys.executable, "-I", str(program), name, JOB, str(INTERVAL_S)]
        sampler = subprocess.Popen(arguments, env={**os.environ, "HPCJOBS_MONITOR": "1"})
        try:
            while not samples.exists() or not read_sample_times(samples):  # its start is not part of the cost
                time.sleep(0.1)
            cpu_before = cpu_s(sampler.pid)
            ends = train((SAMPLES + 1) * INTERVAL_S)
            sample_cpu_s = (cpu_s(sampler.pid) - cpu_before) / (len(read_sample_times(samples)) - 1)
        finally:
            sampler.terminate()
            sampler.wait()
        times = [t for t in read_sample_times(samples) if ends[0] + INTERVAL_S / 2 < t < ends[-1] - INTERVAL_S]
    halves = [(1 - compare_halves(ends, t, INTERVAL_S)) / 2 for t in times]
    control = [(1 - compare_halves(ends, t + INTERVAL_S / 2, INTERVAL_S / 2)) / 2 for t in times]
    keep_samples({"overhead": halves, "control": control})
    rate = (len(ends) - 1) / (ends[-1] - ends[0])
    print(f"{len(times)} samples, {rate:.0f} steps per second, load {os.getloadavg()[0]:.1f}\n{measured_on}")
    report("overhead of throughput", halves)
    report("control, without a sample", control)
    print(f"{'CPU time of a sample':34} {sample_cpu_s * 1e3:.2f} ms: {sample_cpu_s / INTERVAL_S:.3%} of one core")


if __name__ == "__main__":
    main()
