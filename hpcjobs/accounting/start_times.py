"""When a job would start, as Slurm's own scheduler estimates it: ``sbatch --test-only`` submits nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from hpcjobs.processes.programs import Runner, run
from hpcjobs.run.adopt import plan_in
from hpcjobs.run.folder import MANIFEST
from hpcjobs.scheduler.slurm.start_estimate import parse_test_only
from hpcjobs.units import human_duration

_AT_ONCE_S: Final = 60


class StartEstimates(NamedTuple):
    """When the job would start now, in seconds since 1970."""

    as_asked: float
    as_advised: float

    def __str__(self) -> str:
        now = time.time()
        before, after = (_describe_wait(moment - now) for moment in self)
        if abs(self.as_asked - self.as_advised) < _AT_ONCE_S:
            return f"submitted now it would start {before} either way, as Slurm's queue stands"
        return f"submitted now it would start {after} instead of {before}, as Slurm's queue stands"


def estimate_starts(run_dir: Path, options: Sequence[str], *, runner: Runner = run) -> StartEstimates | None:
    """What ``options`` of sbatch would change for the job whose run folder this is; None where Slurm cannot tell."""
    if not options or not (run_dir / MANIFEST).exists():
        return None
    moments = [_estimate_start(run_dir, more, runner) for more in ((), options)]
    return None if moments[0] is None or moments[1] is None else StartEstimates(moments[0], moments[1])


def _estimate_start(run_dir: Path, options: Sequence[str], runner: Runner) -> float | None:
    plan = plan_in(run_dir)
    if plan.job.scheduler != "slurm":
        return None
    env = {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CONF": plan.job.slurm_conf} if plan.job.slurm_conf else {})
    argv = ["sbatch", "--test-only", *options, str(run_dir / "job.sh")]
    answer = runner(argv, cwd=plan.job.chdir if Path(plan.job.chdir).is_dir() else None, env=env)
    return parse_test_only(f"{answer.err}\n{answer.out}") if answer.code == 0 else None


def _describe_wait(seconds: float) -> str:
    return "at once" if seconds < _AT_ONCE_S else f"in {human_duration(seconds)}"
