"""What do `log` and `should_stop` of a script of one's own cost, against the same loop without them?

python benchmarks/script_log.py    CPU time of a loop of short steps, written lines included
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import compete, parse_no_arguments, report

import hpcjobs.runtime
from hpcjobs.runtime import Run

STEPS = int(os.environ.get("STEPS", 20_000))
ROUNDS = int(os.environ.get("ROUNDS", "11"))
ADDITIONS = 500
"""Of a step: about 10 µs, a thousandth of a training step, so that what is added stands out."""

Body = Callable[[Run, int, float], None]


def skip(run: Run, step: int, loss: float) -> None:
    """The loop alone."""


def log(run: Run, step: int, loss: float) -> None:
    run.log(step, loss=loss, tokens=4096)


def log_and_ask(run: Run, step: int, loss: float) -> None:
    run.log(step, loss=loss, tokens=4096)
    run.should_stop()


def measure(body: Body) -> float:
    """CPU milliseconds of the loop, until every line is in the file."""
    with TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        run = hpcjobs.runtime.start(run_dir=folder, total_steps=STEPS)
        began = time.process_time()
        for step in range(1, STEPS + 1):
            loss = float(sum(range(ADDITIONS)))
            body(run, step, loss)
        run.flush()
        took = time.process_time() - began
        run.finish()
    return 1e3 * took


def main() -> int:
    parse_no_arguments(__doc__)
    contestants = {
        "no call": lambda: measure(skip),
        "log": lambda: measure(log),
        "log and should_stop": lambda: measure(log_and_ask),
    }
    outcome = compete("no call", contestants, rounds=ROUNDS)
    report(f"{STEPS} steps, CPU time", outcome, unit="ms")
    alone = outcome.lines[0].median
    for line in outcome.lines[1:]:
        print(f"{line.name}: {1e3 * (line.median - alone) / STEPS:.1f} µs a step more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
