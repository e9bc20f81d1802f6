"""Trainers that every site runs: a trainer is a strategy over a workload.

Every module here whose name does not start with `_` is a trainer: it has `main(argv) -> exit code`,
runs as `python -m hpcjobs.trainers.NAME`, and shows its flags without loading torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def names() -> tuple[str, ...]:
    """The trainers that ship, by file name."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py")))


def run(name: str, argv: Sequence[str] = ()) -> int:
    """Run one trainer in this process, as one rank of the world its environment describes."""
    if name not in names():
        raise ValueError(f"no trainer is called {name!r}: there are {', '.join(names())}")
    code: int = import_module(f"{__name__}.{name}").main(argv)
    return code
