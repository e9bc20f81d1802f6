"""Worlds to test in: real processes that meet over loopback, started by hand as srun would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pytest
from free_ports import free_port

from hpcjobs.record import METRICS
from hpcjobs.record.summary import RunSummary

from .ranks import Rank

REPOSITORY = Path(__file__).parents[3]
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded here: threads that wait for busy cores spin
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as a trainer sets it, before the process that ranks are copied from
FOREIGN = ("SLURM", "PMI", "OMPI", "HOROVOD", "HPCJOBS", "TORCHELASTIC", "MASTER_", "OMP_")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def worlds_path() -> str:
    """PYTHONPATH of ranks that use the workloads of the tests."""
    return f"{REPOSITORY}:{REPOSITORY / 'tests/unit/trainers'}"


@dataclass(frozen=True)
class Outcome:
    """What a world left: by rank its exit code, output and complaints, and the run folder."""

    codes: list[int]
    out: list[str]
    err: list[str]
    run_dir: Path

    @property
    def summary(self) -> RunSummary:
        return RunSummary.read(self.run_dir)

    @property
    def complaints(self) -> list[str]:
        return [line for text in self.err for line in text.splitlines() if line.strip()]

    def lines(self, kind: str) -> list[dict[str, object]]:
        text = (self.run_dir / METRICS).read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]

    def losses(self) -> list[object]:
        return [line["loss"] for line in self.lines("step")]


@dataclass(frozen=True)
class Runs:
    """Several runs of one world, by name of the run folder; a later one may go on in the folder of another."""

    root: Path
    size: int

    def run(self, *runs: tuple[str, str, tuple[str, ...]]) -> None:
        """Folder, trainer and flags of each."""
        plan = self.root / "plan.json"
        listed = [
            {"folder": str(self.root / folder), "trainer": trainer, "flags": flags, "port": free_port()}
            for folder, trainer, flags in runs
        ]
        for folder, _, _ in runs:
            (self.root / folder).mkdir(exist_ok=True)
        plan.write_text(json.dumps(listed), encoding="utf-8")
        paths = (REPOSITORY, REPOSITORY / "tests", Path(__file__).parent)
        env = {"PYTHONPATH": ":".join(map(str, paths)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        ranks = [start_rank(rank, self.size, ["several", str(plan)], env, self.root) for rank in range(self.size)]
        try:
            outputs = [rank.communicate(timeout=550) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * self.size, outputs
        # torch's compiler says so of a machine with nvcc and no GPU, where nothing that it compiled is kept.
        lines = [line for _, err in outputs for line in err.splitlines() if "No CUDA runtime is found" not in line]
        assert not any(map(str.strip, lines)), outputs

    def __getitem__(self, folder: str) -> Outcome:
        return Outcome([], [], [], self.root / folder)


World = Callable[..., Outcome]
Started = Rank | subprocess.Popen[str]


def clean_environment() -> dict[str, str]:
    remaining = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in PLACE}
    warnings = {"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "error")}
    return {**remaining, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **warnings}


def start_rank(
    rank: int, size: int, argv: Sequence[str], env: Mapping[str, str], cwd: Path, *, copied: bool = True
) -> Started:
    """One rank of a world: a copy of a process that has loaded torch, or (not copied) one of its own."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0}
    complete = {**clean_environment(), **{name: str(value) for name, value in place.items()}, **env}
    if copied:
        return Rank(argv, complete, cwd, Path(mkdtemp(prefix=f"rank-{rank}-", dir=cwd)))
    return subprocess.Popen(
        [sys.executable, "-u", "-m", *argv],
        env=complete,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_step(step: int, first: Rank) -> None:
    """Until rank 0 has told of `step` or a later one; fails if it ends before."""
    while not any(int(answer) >= step for answer in re.findall(r"  step +(\d+)/", first.read_output())):
        assert first.poll() is None, f"the run ended before step {step}"
        time.sleep(0.005)


@pytest.fixture
def two_ranks(tmp_path: Path) -> Runs:
    return Runs(tmp_path, 2)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """`world(2, "ddp", "--steps", "5")` runs two ranks and waits for both."""

    def start(
        size: int,
        trainer: str,
        *flags: str,
        env: Mapping[str, str] | None = None,
        env_of: Mapping[int, Mapping[str, str]] | None = None,
        run_dir: str = "run",
        kill_at_step: int | None = None,
        copied: bool = True,
    ) -> Outcome:
        folder = tmp_path / run_dir
        folder.mkdir(exist_ok=True)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "HPCJOBS_RUN_DIR": str(folder),
            **(env or {}),
        }
        argv = [f"hpcjobs.trainers.{trainer}", *flags]
        ranks = [
            start_rank(rank, size, argv, {**common, **(env_of or {}).get(rank, {})}, tmp_path, copied=copied)
            for rank in range(size)
        ]
        if kill_at_step is not None:
            assert isinstance(ranks[0], Rank)
            await_step(kill_at_step, ranks[0])
            for process in ranks:
                process.kill()
        try:
            outputs = [process.communicate(timeout=550) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        codes = [process.returncode or 0 for process in ranks]
        return Outcome(codes, [out for out, _ in outputs], [err for _, err in outputs], folder)

    return start
