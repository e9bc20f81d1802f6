"""What do metrics and the watchdog cost per step, in a run of a million steps?

python benchmarks/recording.py    records 10^6 steps as a run does, and prints their share of a step of 5 ms
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from harness import parse_no_arguments

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.runtime.watchdog import Watchdog
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.distributed import RankGroup
from hpcjobs.trainers.metrics import Recorder
from hpcjobs.trainers.optimization import plan_training
from hpcjobs.trainers.workloads.lm import lm

STEPS = int(os.environ.get("STEPS", 10**6))
STEP_S = 0.005
"""A short step: a GPU's seldom takes less, and mnist's on one core takes this."""


def record(steps: int) -> float:
    """CPU seconds for all that is recorded and watched of so many steps, the watching thread included."""
    config = Config(workload="lm", steps=steps)
    workload = lm(config)
    group = RankGroup(DistEnv.from_environ({}), ("here",), torch.device("cpu"), "gloo")
    plan = plan_training(config, workload, group.world_size)
    loss = torch.ones(())
    with TemporaryDirectory() as folder, Recorder(group, plan, workload, Path(folder), resumed=None) as recorder:
        guard = Watchdog(group, Path(folder), lambda: recorder.meter.recent_steps, after_s=None, on=True)
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            began = time.process_time()
            for step in range(1, steps + 1):
                recorder.meter.begin()
                recorder.meter.data_ready()
                guard.beat(step, "step")
                recorder.meter.end()
                recorder.add(loss)
                guard.beat(step, "data")
                if step % config.log_every == 0:
                    recorder.flush(step, 0)
                    guard.update_limit()
            took = time.process_time() - began
        guard.close()
    return took


def main() -> int:
    parse_no_arguments(__doc__)
    torch.set_num_threads(1)
    first, last = record(STEPS // 100), record(STEPS)
    each_s = last / STEPS
    share = f"{each_s / STEP_S:.2%} of {1e3 * STEP_S:g} ms"
    print(f"{STEPS:,} steps recorded and watched: {1e6 * each_s:.1f} µs each, {share}")
    print(f"a step of a run 100 times as long costs {each_s / (first / (STEPS // 100)):.2f} times as much")
    return 0


if __name__ == "__main__":
    sys.exit(main())
