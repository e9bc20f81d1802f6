"""Starts the scheduler's commands: the one outside thing of this package, injected so that tests need no cluster."""

from subprocess import TimeoutExpired
from typing import Callable, Dict, List

from hpcjobs.processes import start
from hpcjobs.processes.start import Result

TIMEOUT_S = 30.0
"""slurmctld answers within seconds, or is down."""


Run = Callable[[List[str], Dict[str, str]], Result]


def run(argv: List[str], env: Dict[str, str]) -> Result:
    """Run ``argv`` with exactly ``env``. Exit code 127: it could not be started; 124: it did not end in time."""
    try:
        return start.run(argv, env=env, timeout_s=TIMEOUT_S, errors="replace")
    except OSError as error:
        return Result(127, "", f"{argv[0]}: {error.strerror}")
    except TimeoutExpired:
        return Result(124, "", f"{argv[0]} did not answer within {TIMEOUT_S:.0f} s")


def outside_job(environ: Dict[str, str]) -> Dict[str, str]:
    """``environ`` without what Slurm set for this job, and without a user's defaults for Slurm's commands."""
    ours = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_", "SCONTROL_", "HPCJOBS_")
    exceptions = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in environ.items() if name in exceptions or not name.startswith(ours)}
