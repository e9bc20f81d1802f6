"""Asks Slurm's own scheduler when a job would start: ``sbatch --test-only`` submits nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import msgspec

from hpcjobs.job.directives import sbatch_options
from hpcjobs.job.models import Job
from hpcjobs.processes.programs import Runner, run
from hpcjobs.site.resources import is_option_where

_EXPECTED_START = re.compile(r"\bstart(?:s|ing)?(?: ?time)?(?:[:=]| at| is)\s*(\S+?)[,.;]?(?:\s|$)", re.IGNORECASE)
_PREFIX = re.compile(r"^(?:sbatch: )?(?:error: )?(?:allocation failure: )?")


class Estimate(msgspec.Struct, frozen=True):
    """Slurm's answer: when the job would start (seconds since 1970), or why it refuses it. None, None: no estimate."""

    start: float | None = None
    refusal: str | None = None
    messages: tuple[str, ...] = ()
    """What a plugin of the site says of the job."""


def estimate_start(job: Job, *, runner: Runner = run) -> Estimate:
    """Slurm's estimate for ``job`` if it were submitted now."""
    options = [
        f"--{name}" if value is None else f"--{name}={value}"
        for name, value in sbatch_options(job)
        if not is_option_where(name, "first_run")  # Slurm has no estimate for them
    ]
    return ask_sbatch([*options, "--wrap=true"], slurm_conf=job.slurm_conf, cwd=job.chdir, runner=runner)


def ask_sbatch(
    args: Sequence[str], *, slurm_conf: str | None = None, cwd: str | None = None, runner: Runner = run
) -> Estimate:
    """Slurm's estimate for these arguments of sbatch: options, and a script or ``--wrap``."""
    env = {"SLURM_TIME_FORMAT": "%s"} | ({"SLURM_CONF": slurm_conf} if slurm_conf else {})
    answer = runner(["sbatch", "--test-only", *args], cwd=cwd, env=env)
    if answer.code == 0:
        lines = [line.removeprefix("sbatch: ").strip() for line in answer.err.splitlines()]
        messages = tuple(line for line in lines if line and parse_start(line) is None and not line.startswith("Job "))
        return Estimate(parse_start(f"{answer.err}\n{answer.out}"), messages=messages)
    lines = [line for line in (answer.err or answer.out).splitlines() if line.strip()]
    # A plugin of the site (job_submit) says why before sbatch's own line.
    texts = dict.fromkeys(text for line in lines if (text := _PREFIX.sub("", line.strip())))
    return Estimate(refusal="; ".join(texts) if texts else f"sbatch ended with exit code {answer.code}")


def parse_start(text: str) -> float | None:
    """Seconds since 1970 from what ``sbatch --test-only`` printed; None: it has no estimate.

    The line is ``sbatch: Job 7 to start at TIME using ...`` on standard error. TIME is in seconds with
    SLURM_TIME_FORMAT=%s, local time where a version ignores that.
    """
    for expected in _EXPECTED_START.findall(text):
        if expected.isdigit():
            return float(expected)
        try:
            return time.mktime(time.strptime(expected, "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            continue
    return None
