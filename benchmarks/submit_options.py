"""What do the options of submit cost, typed and not typed, against Python's start and sbatch's together?

    python benchmarks/submit_options.py [--rounds 11]

Needs Slurm's commands and no cluster: nothing is submitted. ``sbatch --version`` is the start of sbatch alone; a real
submission costs it more, so the ratios here are upper bounds of those of ``benchmarks/submit.py``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from harness import compete, cpu_ms, report

SITE = "{scheduler: slurm, description: two nodes, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}}\n"
OFTEN = ("-N", "2", "--ntasks-per-node", "4", "-t", "1h", "--mem", "4G")
RARE = ("--nice=10", "--comment", "x", "--reservation", "r", "--gpu-freq", "low", "--licenses", "a", "--wckey", "w")


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    if shutil.which("sbatch") is None:
        raise SystemExit("sbatch is not on PATH")
    python, cli = sys.executable, str(Path(sys.executable).parent / "hpcjobs")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "bench.yaml"
        site.write_text(SITE, encoding="utf-8")
        settings = Path(folder) / "slurm.conf"
        settings.write_text("ClusterName=bench\nSlurmctldHost=localhost\n", encoding="utf-8")
        os.environ["SLURM_CONF"] = str(settings)  # sbatch does not start without one

        def cost(*arguments: str) -> float:
            return cpu_ms([cli, *arguments], cwd=folder)

        dry_run = ("submit", "--site", str(site), "--dry-run")
        outcome = compete(
            "python -c pass + sbatch --version",
            {
                "python -c pass + sbatch --version": lambda: (
                    cpu_ms([python, "-c", "pass"]) + cpu_ms(["sbatch", "--version"])
                ),
                "python -c 'import typer'": lambda: cpu_ms([python, "-c", "import typer"]),
                "hpcjobs --help": lambda: cost("--help"),
                "hpcjobs submit --help": lambda: cost("submit", "--help"),
                "hpcjobs submit --dry-run": lambda: cost(*dry_run, "true"),
                "the same, 4 common options": lambda: cost(*dry_run, *OFTEN, "true"),
                "the same, 6 rare ones too": lambda: cost(*dry_run, *OFTEN, *RARE, "true"),
            },
            rounds=rounds,
        )
    report("Options of submit, CPU time (aim: submit --dry-run <= 6)", outcome, unit="ms")


if __name__ == "__main__":
    main()
