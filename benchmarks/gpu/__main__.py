"""Prove the GPU path on this machine: every trainer, errors, speed and memory.

Writes gpu-report/: report.md, report.json and pictures."""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hpcjobs
from gpu import speed, training
from gpu.bench import Bench
from gpu.report import draw, write_report
from gpu.steps import Outcome, Step, run_step
from hpcjobs.trainers.metrics import peak_flops_per_s

STEPS: tuple[Step, ...] = (*training.STEPS, *speed.PROGRAMS, *speed.SPEEDS, speed.HOROVOD, training.HOROVOD)
"""Horovod comes last: to build it takes minutes."""
MINUTES = 10.0
EPILOG = """\
With a GPU it takes at most ten minutes (--minutes): steps for which no time is left are not run. With several GPUs the
trainers use all of them. If a step fails, the others still run, and the report is rewritten after each step.
Exit code: 0 if all steps passed or could not run here, 1 if one failed, 2 for a wrong option or if there is no GPU, 130
after SIGINT (Ctrl-C), 143 after SIGTERM.

make gpu                                  all steps, on this machine's GPUs
make gpu ARGS=--rehearse                  the same steps on the CPU, with tiny sizes; speed is not judged
make gpu ARGS='--only fabric matmul'      some of the steps
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make gpu",
        usage="make gpu [ARGS='OPTION...']",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run the steps on the CPU with tiny sizes; this proves nothing about a GPU",
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps; --list names them")
    parser.add_argument("--list", action="store_true", help="print the steps and what each checks, and run none")
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help=f"time limit of all steps together [{MINUTES:g}; with --rehearse no limit]",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-report"), metavar="DIR", help="folder of the report [gpu-report]"
    )
    args = parser.parse_args(argv)
    names = [step.name for step in STEPS]
    for name in args.only or ():
        if name not in names:
            parser.error(f"no step {name!r}; there are {', '.join(names)}")
    if not (args.rehearse or args.list) and (problem := explain_no_gpu()) is not None:
        parser.error(problem)
    return args


def explain_no_gpu() -> str | None:
    """Why no step can run on a GPU of this machine; None: there is one."""
    try:
        import torch  # takes seconds, which the help does not need
    except ImportError as error:
        return f"torch cannot be loaded by {sys.executable}: {error}"
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch.cuda.is_available() is False"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    return f"torch {torch.__version__} sees no GPU here: {reason}; --rehearse runs the same steps on the CPU"


def describe_machine(*, rehearse: bool) -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "rehearsal": rehearse,
        "date": time.strftime("%F"),
        "host": platform.node(),
        "hpcjobs": hpcjobs.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    if rehearse:
        return facts
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    name, count = properties[0].name, properties[0].multi_processor_count
    peak = peak_flops_per_s(name, "bf16", tf32=False, multiprocessors=count)
    return {
        **facts,
        "gpus": ", ".join(f"{one.name} ({one.total_memory / 1e9:.0f} GB)" for one in properties),
        "CUDA or ROCm": torch.version.cuda or torch.version.hip,
        "NCCL or RCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "stated peak in bf16": f"{peak / 1e12:g} TFLOP/s" if peak else f"none is stated for {name}: no MFU",
    }


def make_bench(out: Path, *, rehearse: bool, minutes: float | None) -> Bench:
    import torch

    device, ranks = ("cpu", 1) if rehearse else ("cuda", torch.cuda.device_count())
    minutes = MINUTES if minutes is None and not rehearse else minutes
    return Bench(
        out, device, ranks, rehearse, minutes, math.inf if minutes is None else time.monotonic() + 60 * minutes
    )


def run_all(steps: Sequence[Step], bench: Bench, machine: Mapping[str, Any]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for step in steps:
        print(f"{step.name:24} ", end="", flush=True)
        outcome = run_step(step, bench)
        outcomes.append(outcome)
        print(f"{outcome.verdict:8} {outcome.seconds:6.1f} s  {'; '.join(outcome.problems)}", flush=True)
        try:
            write_report(bench.out, machine, outcomes)
        except OSError as error:  # the lines above and the report before this step are what is left then
            print(f"warning: the report cannot be written: {error}", flush=True)
    return outcomes


def stop_on_signals() -> None:
    """Leave at once when told to, by an exception: what was started is killed."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)


def draw_all(folder: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """The pictures, and the report with them."""
    try:
        write_report(folder, machine, outcomes, draw(folder, outcomes))
    except (ImportError, OSError) as error:
        print(f"warning: no pictures: {error}", flush=True)


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Which steps failed, and which were not run."""
    names = {verdict: [one.name for one in outcomes if one.verdict == verdict] for verdict in ("failed", "not run")}
    lines = [f"{verdict}: {', '.join(listed)}" for verdict, listed in names.items() if listed]
    return "; ".join(lines if names["failed"] else ["no step failed", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        print("".join(f"{step.name:24} {step.about}\n" for step in STEPS), end="")
        return 0
    chosen = [step for step in STEPS if args.only is None or step.name in args.only]
    shutil.rmtree(args.out / "runs", ignore_errors=True)  # of an earlier report: its runs would be resumed
    args.out.mkdir(parents=True, exist_ok=True)
    bench = make_bench(args.out.resolve(), rehearse=args.rehearse, minutes=args.minutes)
    machine = describe_machine(rehearse=args.rehearse)
    outcomes = run_all(chosen, bench, machine)
    draw_all(bench.out, machine, outcomes)
    print(f"{bench.out / 'report.md'}: {summarize(outcomes)}", flush=True)
    return 1 if any(one.verdict == "failed" for one in outcomes) else 0


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
