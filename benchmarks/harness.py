"""One protocol for every benchmark: all contestants in one run, order shuffled in each round.

A figure is the median over rounds of the ratio to the baseline of the same round. The baseline runs twice
a round; when its two halves differ by more than 3 % the run calls itself noisy. Raw samples go to
``bench-results/FILE.json``, or ``FILE-NAME.json`` where a file compares several things.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled: pip does it
RESULTS = Path(__file__).resolve().parent.parent / "bench-results"
NOISY = 0.03

Contestant = Callable[[], float]
"""Runs once and returns what it cost, in the unit of the benchmark."""


class Line(NamedTuple):
    """One contestant: ratio to the baseline (median of per-round ratios), quartiles, least cost.

    ``interval`` is that of the median with a confidence of 95 %, by bootstrap over the rounds.
    """

    name: str
    ratio: float
    quartiles: tuple[float, float]
    median: float
    least: float
    interval: tuple[float, float]


class Outcome(NamedTuple):
    """All contestants of one run; ``control`` is the baseline against itself."""

    lines: list[Line]
    control: float

    @property
    def noisy(self) -> bool:
        """The baseline differed from itself by more than 3 %."""
        return abs(self.control - 1) > NOISY


def compete(
    baseline: str,
    contestants: Mapping[str, Contestant],
    *,
    rounds: int = 11,
    seed: int = 0,
    name: str | None = None,
) -> Outcome:
    """Run every contestant once a round, in a shuffled order, the baseline twice."""
    control = f"{baseline} (again)"
    runners = {**contestants, control: contestants[baseline]}
    order = random.Random(seed)
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for runner in runners.values():
        runner()  # warm-up: page cache, compiled bytecode
    for _ in range(rounds):
        names = list(runners)
        order.shuffle(names)
        for name in names:
            samples[name].append(runners[name]())
    base = samples[baseline]
    lines = [_line(name, samples[name], base) for name in contestants]
    again = [a / b for a, b in zip(samples[control], base, strict=True)]
    outcome = Outcome(lines, statistics.median(again))
    keep_samples(samples, name)
    return outcome


def _line(name: str, costs: Sequence[float], base: Sequence[float]) -> Line:
    ratios = [cost / reference for cost, reference in zip(costs, base, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    interval = bootstrap(ratios)
    return Line(name, statistics.median(ratios), (low, high), statistics.median(costs), min(costs), interval)


def bootstrap(ratios: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The interval that holds the median of ``ratios`` with a confidence of 95 %."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return medians[round(0.025 * resamples)], medians[round(0.975 * resamples) - 1]


def report(title: str, outcome: Outcome, *, unit: str) -> None:
    """Print the table of one run."""
    print(f"\n{title}\n{machine()}")
    print(f"{'':44} {'ratio':>7}  {'quartiles':>15}  {'median ' + unit:>12}  {'least':>8}")
    for line in outcome.lines:
        quartiles = f"{line.quartiles[0]:.2f} - {line.quartiles[1]:.2f}"
        print(f"{line.name:44} {line.ratio:7.2f}  {quartiles:>15}  {line.median:12.2f}  {line.least:8.2f}")
    verdict = "NOISY: no conclusion from times" if outcome.noisy else "quiet"
    print(f"baseline against itself: {outcome.control:.3f} ({verdict})", flush=True)


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser of the command line: ``--help`` prints ``text``, the docstring of the benchmark."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_no_arguments(text: str | None) -> None:
    """Answer ``--help``, and refuse arguments: the benchmark has none."""
    parser_of(text).parse_args()


def machine() -> str:
    """What the figures were taken on."""
    model = next(
        (row.split(":", 1)[1].strip() for row in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in row),
        platform.processor(),
    )
    return f"{len(os.sched_getaffinity(0))} cores, {model}, Python {platform.python_version()}, {time.strftime('%F')}"


def cpu_ms(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> float:
    """User plus system CPU time of ``argv`` and its children, in milliseconds; its failure is an error."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = None if env is None else dict(env)
    done = subprocess.run(
        list(argv), env=environment, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def wall_ms(action: Callable[[], object]) -> float:
    """Wall time of ``action`` in milliseconds."""
    begun = time.perf_counter()
    action()
    return (time.perf_counter() - begun) * 1e3


def keep_samples(samples: Mapping[str, Sequence[float]], comparison: str | None = None) -> None:
    """Write raw samples to ``bench-results``."""
    RESULTS.mkdir(exist_ok=True)
    name = Path(sys.argv[0]).stem + ("" if comparison is None else f"-{comparison}")
    content = {"machine": machine(), "time": time.time(), "samples": samples}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1))
