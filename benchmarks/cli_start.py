"""What does starting the command line cost, in CPU time, against Python itself and the peers that are installed?

    python benchmarks/cli_start.py [--rounds 11]

Peers are found on PATH (torchrun, torchx, reportseff, nemo, and HPC-launcher as launch); those missing are named and
left out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness import compete, cpu_ms, report

PEERS = ("torchrun", "torchx", "reportseff", "nemo", "launch")
FORBIDDEN = ("torch", "pandas", "submitit", "jinja2", "msgspec", "pydantic", "yaml", "rich")


def _cost(*argv: str) -> Callable[[], float]:
    return lambda: cpu_ms(argv)


def modules_loaded(*arguments: str) -> set[str]:
    """Top-level modules that ``hpcjobs ARGUMENTS`` has imported when it ends."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr))\n"
        "from hpcjobs.cli import main\n"
        f"sys.argv = ['hpcjobs', *{list(arguments)!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def main() -> None:
    """Print the ratios and the count of modules; exit 1 when help loads what it must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    python, here = sys.executable, Path(sys.executable).parent
    contestants = {
        "python -c pass": _cost(python, "-c", "pass"),
        "import typer": _cost(python, "-c", "import typer"),
        "hpcjobs --help": _cost(str(here / "hpcjobs"), "--help"),
        "hpcjobs submit --help": _cost(str(here / "hpcjobs"), "submit", "--help"),
        "hpcjobs --version": _cost(str(here / "hpcjobs"), "--version"),
    }
    missing = []
    for peer in PEERS:
        program = shutil.which(peer, path=str(here)) or shutil.which(peer)
        if program:
            contestants[f"{peer} --help"] = _cost(program, "--help")
        else:
            missing.append(peer)
    outcome = compete("python -c pass", contestants, rounds=rounds)
    report("Cold start, CPU time (gate: hpcjobs --help <= 6.5, goal 4)", outcome, unit="ms")
    if missing:
        print(f"not installed here, so not measured: {', '.join(missing)}")
    loaded = modules_loaded("--help")
    heavy = sorted(loaded & set(FORBIDDEN))
    print(f"modules loaded by --help: {len(loaded)} top-level; heavy ones: {', '.join(heavy) or 'none'}")
    sys.exit(1 if heavy else 0)


if __name__ == "__main__":
    main()
