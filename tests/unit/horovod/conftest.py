"""Worlds of Horovod ranks on this machine: several runs in the same processes, since starting costs seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port

from hpcjobs.record import METRICS
from hpcjobs.record.summary import RunSummary

REPOSITORY = Path(__file__).parents[3]
SEVERAL = """
import json, os, sys, pathlib
from hpcjobs import trainers
codes = []
for job in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    os.environ["MASTER_PORT"], os.environ["HPCJOBS_RUN_DIR"] = job["port"], job["folder"]
    codes.append(trainers.run(job["trainer"], job["flags"]))
sys.exit(max(codes))
"""
FOREIGN = ("SLURM", "PMI", "OMPI", "HOROVOD", "HPCJOBS", "TORCHELASTIC", "MASTER_", "OMP_")


@dataclass(frozen=True)
class Ended:
    codes: list[int]
    out: str
    err: str


@dataclass(frozen=True)
class Runs:
    """Run folders under `root`, by name."""

    root: Path

    def losses(self, name: str) -> list[float]:
        lines = map(json.loads, (self.root / name / METRICS).read_text(encoding="utf-8").splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]

    def summary(self, name: str) -> RunSummary:
        return RunSummary.read(self.root / name)

    def go(
        self, size: int, *jobs: tuple[str, str, str], over: str = "gloo", warnings: str = "error", **env: str
    ) -> Ended:
        """Run `(folder, trainer, flags)` one after the other on `size` ranks; `over` gloo or mpi."""
        plan = self.root / f"jobs-{len(list(self.root.iterdir()))}.json"
        listed = []
        for folder, trainer, flags in jobs:
            (self.root / folder).mkdir(exist_ok=True)
            where = {"folder": str(self.root / folder), "port": str(free_port())}
            listed.append({**where, "trainer": trainer, "flags": flags.split()})
        plan.write_text(json.dumps(listed), encoding="utf-8")
        argv = [sys.executable, "-W", warnings, "-u", "-c", SEVERAL, str(plan)]
        return (ranks_over_mpi if over == "mpi" else ranks_by_hand)(size, argv, self.root, env)


def environment(**more: str) -> dict[str, str]:
    remaining = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    ours = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    return {**remaining, **ours, **more}


def ranks_by_hand(size: int, argv: list[str], cwd: Path, env: dict[str, str]) -> Ended:
    ranks = [
        subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
                            NODE_RANK="0", **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=550) for rank in ranks]
    return Ended([rank.returncode for rank in ranks], *("".join(texts) for texts in zip(*outputs, strict=True)))


def ranks_over_mpi(size: int, argv: list[str], cwd: Path, env: dict[str, str]) -> Ended:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    # Interfaces of sandboxes that other tests bring up and down on this machine are no way between its ranks.
    over_loopback = ["--mca", "btl_tcp_if_include", "lo"]
    mpirun = ["mpirun", "--host", f"localhost:{size}", "--bind-to", "none", *over_loopback, *argv]
    ended = subprocess.run(mpirun, cwd=cwd, env=environment(**root, **env), capture_output=True, text=True, timeout=550)
    return Ended([ended.returncode], ended.stdout, ended.stderr)
