"""Starting the scheduler's commands: the one outside thing of this package, injected so that tests need no cluster."""

import subprocess
from typing import Callable, Dict, List, NamedTuple

TIMEOUT_S = 30.0
"""slurmctld answers within seconds, or is down."""


class Answer(NamedTuple):
    """What a command did; code 127: it could not be started, 124: it did not end in time."""

    code: int
    out: str
    err: str


Run = Callable[[List[str], Dict[str, str]], Answer]


def run(words: List[str], env: Dict[str, str]) -> Answer:
    """Run ``words`` with exactly ``env``."""
    try:
        done = subprocess.run(
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
        )
    except OSError as error:
        return Answer(127, "", f"{words[0]}: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{words[0]} did not answer within {TIMEOUT_S:.0f} s")
    return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace"))


def outside_job(environ: Dict[str, str]) -> Dict[str, str]:
    """``environ`` without what Slurm set for this job, and without a user's defaults for Slurm's commands."""
    ours = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SRUN_", "SCONTROL_", "HPCJOBS_")
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {name: value for name, value in environ.items() if name in kept or not name.startswith(ours)}
