"""Trainers that every site runs: a trainer is a strategy over a workload.

The modules of NAMES are trainers. Each has `main(argv) -> exit code`, runs as `python -m hpcjobs.trainers.NAME`, and
shows its flags without loading torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

NAMES = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch", "horovod", "lightning")


def run(name: str, argv: Sequence[str] = (), **flags: str | float | bool | None) -> int:
    """Run one trainer in this process, as one rank of the world its environment describes; the exit code.

    ``run("ddp", workload="mnist", lr=0.1)`` is ``ddp --workload=mnist --lr=0.1``; None leaves a flag out.
    """
    if name not in NAMES:
        raise ValueError(f"no trainer is called {name!r}: there are {', '.join(NAMES)}")
    code: int = import_module(f"{__name__}.{name}").main([*argv, *flag_arguments(flags)])
    return code


def flag_arguments(flags: Mapping[str, str | float | bool | None]) -> list[str]:
    """Keywords as command-line flags."""
    dashed = {name.replace("_", "-"): value for name, value in flags.items() if value is not None}
    return [
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in dashed.items()
    ]
