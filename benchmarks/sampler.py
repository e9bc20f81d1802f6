"""What does the sampler of `hpcjobs monitor` cost a training in throughput?

    python benchmarks/sampler.py

A training step by hand (a decoder layer, one thread) alone and beside a sampler at its usual 5 s. The sampler is the
same process all the time: SIGSTOP stops it where a run is to be alone, so that its start does not count. One that
continues takes a sample at once, since it is late. Half an interval after that a run begins, which holds exactly two
samples. The order is shuffled in each round, and a ratio is that of two runs of one round. Two costs per step: CPU
time, the sampler's own included, which holds on a machine that does other work too, and wall time, which only holds on
a machine that does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from harness import compete, report
from torch import nn

from hpcjobs.pyz import pack

JOB, INTERVAL_S, SAMPLES = "4711", 5.0, 2
ROUNDS = int(os.environ.get("ROUNDS", "15"))


def make_step() -> Callable[[], None]:
    """One training step of a decoder layer."""
    torch.set_num_threads(1)
    model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 64, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def count_samples(path: Path) -> int:
    """How many samples were taken so far."""
    return path.read_bytes().count(b'"sample"') if path.exists() else 0


class Timed:
    """Runs steps for as long as some samples take, with or without the sampler; milliseconds per step."""

    def __init__(self, sampler: psutil.Process, samples: Path) -> None:
        self._sampler, self._samples, self._step = sampler, samples, make_step()
        self.alone_cpu, self.sampled_cpu = self._contestant(False, cpu=True), self._contestant(True, cpu=True)
        self.alone_wall, self.sampled_wall = self._contestant(False, cpu=False), self._contestant(True, cpu=False)

    def _contestant(self, sampled: bool, *, cpu: bool) -> Callable[[], float]:
        def run() -> float:
            self._prepare(sampled=sampled)
            taken = count_samples(self._samples)
            spent = self._cpu_s if cpu else time.perf_counter
            began, before, steps = time.perf_counter(), spent(), 0
            while time.perf_counter() - began < SAMPLES * INTERVAL_S:
                self._step()
                steps += 1
            cost = (spent() - before) / steps * 1e3
            assert count_samples(self._samples) == taken + SAMPLES * sampled
            return cost

        return run

    def _prepare(self, *, sampled: bool) -> None:
        """Stop the sampler, or let it continue until a sample is half an interval old; either takes as long."""
        self._sampler.send_signal(signal.SIGSTOP)
        time.sleep(INTERVAL_S)
        taken = count_samples(self._samples)
        if sampled:
            self._sampler.send_signal(signal.SIGCONT)
            while count_samples(self._samples) == taken:
                time.sleep(0.01)
        time.sleep(INTERVAL_S / 2)

    def _cpu_s(self) -> float:
        used = self._sampler.cpu_times()
        return time.process_time() + float(used.user + used.system)


def main() -> None:
    """Print both costs as ratios with their intervals."""
    if os.environ.get("HPCJOBS_JOB_ID") != JOB:  # the sampler knows the job's ranks by their environment
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "HPCJOBS_JOB_ID": JOB, "RANK": "0"})
    with TemporaryDirectory() as name:
        program = Path(name) / "monitor.pyz"
        program.write_bytes(pack("hpcjobs.node.monitor"))
        arguments = [sys.executable, "-I", str(program), name, JOB, str(INTERVAL_S)]
        process = subprocess.Popen(arguments, env={**os.environ, "HPCJOBS_MONITOR": "1"})
        try:
            timed = Timed(psutil.Process(process.pid), Path(name) / "monitor.jsonl")
            for kind in ("cpu", "wall"):
                runs = {"alone": getattr(timed, f"alone_{kind}"), "with the sampler": getattr(timed, f"sampled_{kind}")}
                outcome = compete("alone", runs, rounds=ROUNDS, name=kind)
                report(f"{kind} time per step, load {os.getloadavg()[0]:.1f}", outcome, unit="ms")
                low, high = outcome.lines[1].interval
                print(f"overhead {outcome.lines[1].ratio - 1:+.2%} (95 % interval {low - 1:+.2%} to {high - 1:+.2%})")
            print(f"{count_samples(Path(name) / 'monitor.jsonl')} samples were taken", flush=True)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
