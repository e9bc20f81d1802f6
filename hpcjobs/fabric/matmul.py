"""``python -m hpcjobs.fabric.matmul [OPTION]...``: the CUDA and MPI program, built here if it has not been."""

from __future__ import annotations

import sys

from hpcjobs.fabric.build import build
from hpcjobs.processes.start import become
from hpcjobs.runtime.exits import TrainerError


def main(argv: list[str]) -> int:
    """Become the program; the exit code if that cannot be."""
    try:
        program = build()
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return become(str(program), [str(program), *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
