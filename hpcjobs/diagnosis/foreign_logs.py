"""Finds the log files of a job that was submitted without hpcjobs: standard output, standard error, and each rank's."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcjobs.diagnosis.accounting import Account
from hpcjobs.diagnosis.values import LogLine
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.scheduler.slurm.output_files import accounted_files

_RANK_FILE = re.compile(r"(?P<job>.*_)(?P<rank>\d+)_log\.(?:out|err)")
"""How submitit names the files of each rank."""


def find_foreign_logs(account: Account, slurm: SlurmScheduler) -> list[Path]:
    """The log files that exist: those that scontrol names, else those of its command line and script, else sbatch's
    own."""
    paths = [Path(log) for log in account.logs] or accounted_files(slurm, account.job_id)
    if not paths:
        paths = [Path(account.work_dir or ".", f"slurm-{account.job_id}.out")]
    for path in list(paths):
        if match := _RANK_FILE.fullmatch(path.name):
            paths += sorted(path.parent.glob(f"{glob.escape(match['job'])}*_log.*"))
    return [path for path in dict.fromkeys(paths) if os.path.isfile(path)]


def with_rank_of_file(lines: Sequence[LogLine], path: Path) -> list[LogLine]:
    """The lines with the rank that the name of their file says, where they have none of their own."""
    match = _RANK_FILE.fullmatch(path.name)
    if match is None:
        return list(lines)
    rank = int(match["rank"])
    return [line if line.rank is not None else msgspec.structs.replace(line, rank=rank) for line in lines]
