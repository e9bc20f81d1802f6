"""Finds the log files of a job that was submitted without hpcjobs: standard output, standard error, and each rank's."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from hpcjobs.diagnosis.accounting import Account
from hpcjobs.diagnosis.values import LogLine
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.scheduler.slurm.output_files import accounted_files, files_of_steps, find_script

LogFile: TypeAlias = "tuple[Path, int | None]"
"""A file, and the rank whose lines it has; None: of no single rank."""
_RANK_FILE = re.compile(r"(?P<job>.*_)(?P<rank>\d+)_log\.(?:out|err)")
"""How submitit names the files of each rank."""


def find_foreign_logs(account: Account, slurm: SlurmScheduler) -> list[LogFile]:
    """The log files that exist: those that scontrol names, else those of its command line and script, else sbatch's
    own; and those of the steps of its script."""
    paths = [Path(log) for log in account.logs] or accounted_files(slurm, account.job_id)
    if not paths:
        paths = [Path(account.work_dir or ".", f"slurm-{account.job_id}.out")]
    for path in list(paths):
        if match := _RANK_FILE.fullmatch(path.name):
            paths += sorted(path.parent.glob(f"{glob.escape(match['job'])}*_log.*"))
    files = {path: _rank_of_file(path) for path in paths if os.path.isfile(path)}
    if script := find_script(slurm, account.job_id):
        files.update(files_of_steps(script[0], job_id=account.job_id, name=account.name, folder=script[1]))
    return list(files.items())


def _rank_of_file(path: Path) -> int | None:
    match = _RANK_FILE.fullmatch(path.name)
    return None if match is None else int(match["rank"])


def with_rank(lines: Sequence[LogLine], rank: int | None) -> list[LogLine]:
    """The lines with the rank of their file, where they have none of their own."""
    if rank is None:
        return list(lines)
    return [line if line.rank is not None else msgspec.structs.replace(line, rank=rank) for line in lines]
