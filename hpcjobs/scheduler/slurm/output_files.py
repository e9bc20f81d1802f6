"""Finds the files that jobs of sbatch print to: what slurmctld says, else the command that submitted the job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.job.batch import is_batch_script, read_batch_script
from hpcjobs.scheduler.slurm.client import SlurmScheduler
from hpcjobs.scheduler.slurm.fields import read_shown
from hpcjobs.scheduler.slurm.table import SHOW_JOB, Table, TableRow

_SUBMISSION: Final = Table(("JobID", "JobIDRaw", "JobName", "User", "WorkDir", "SubmitLine"))
_PATTERN = re.compile(r"%(\d*)([%AajJNnstux])")
_STATED = {
    "output": re.compile(r"(?:-o|--outp?u?t?[= ])[ ]*(\S+)"),
    "error": re.compile(r"(?:-e|--err?o?r?[= ])[ ]*(\S+)"),
}
_DEFAULT, _DEFAULT_OF_TASK = "slurm-%j.out", "slurm-%A_%a.out"


def output_file(slurm: SlurmScheduler, job_id: str) -> Path | None:
    """The file of job or array task ``job_id``; None: neither slurmctld nor the accounting knows it.

    slurmctld forgets a job some minutes after its end. Then the options of the recorded sbatch command count, else the
    ``#SBATCH`` lines of the script that it names, as the script is now, else sbatch's default.
    """
    try:
        shown = read_shown(slurm.query([*SHOW_JOB, job_id]).splitlines()[0])
    except (SchedulerError, IndexError):
        shown = {}
    if path := TableRow(shown).name("StdOut"):
        return _expand(Path(path), job_id, {"x": shown.get("JobName"), "j": shown.get("JobId")})
    try:
        rows = _SUBMISSION.rows(slurm.query(_SUBMISSION.sacct("--allocations", f"--jobs={job_id}")))
        row = next(rows, None)
    except SchedulerError:
        return None
    return None if row is None else _from_accounting(row, job_id)


def accounted_files(slurm: SlurmScheduler, job_id: str) -> list[Path]:
    """The files of standard output and error of a job that slurmctld has forgotten, as far as the accounting shows."""
    try:
        rows = _SUBMISSION.rows(slurm.query(_SUBMISSION.sacct("--allocations", f"--jobs={job_id}")))
        row = next(rows, None)
    except SchedulerError:
        return []
    if row is None:
        return []
    error = _stated_file(row.name("SubmitLine") or "", Path(row.name("WorkDir") or "."), "error")
    return [_from_accounting(row, job_id), *([_from_accounting(row, job_id, error)] if error else [])]


def _from_accounting(row: TableRow, job_id: str, stated: str | None = None) -> Path:
    folder = Path(row.name("WorkDir") or ".")
    default = _DEFAULT_OF_TASK if "_" in job_id else _DEFAULT
    pattern = stated or _stated_file(row.name("SubmitLine") or "", folder, "output") or default
    names = {"x": row.name("JobName"), "u": row.name("User"), "j": row.text("JobIDRaw")}
    return _expand(folder / pattern, job_id, names)


def _stated_file(command: str, folder: Path, stream: str) -> str | None:
    """The ``--output`` or ``--error`` of a recorded sbatch command or of its script.

    Slurm records the words of the command without their quotes: the first one that is a file is taken for the script,
    unless it follows an option.
    """
    arguments = command.partition(" --wrap")[0].split()[1:]
    for number, argument in enumerate(arguments):
        if stated := _STATED[stream].match(" ".join(arguments[number : number + 2])):
            return stated[1]
        is_value = number > 0 and arguments[number - 1].startswith("-")
        if not argument.startswith("-") and not is_value and (folder / argument).is_file():
            return _file_of_script(folder / argument, stream)
    script = next((argument for argument in arguments if is_batch_script(folder / argument)), None)
    return None if script is None else _file_of_script(folder / script, stream)  # behind an option that has no value


def _file_of_script(path: Path, stream: str) -> str | None:
    try:
        directives = read_batch_script(path).directives
    except RequestError:  # no script by now, or one of a newer sbatch
        return None
    return next((d.value for d in reversed(directives) if d.option.name == stream and d.value), None)


def _expand(path: Path, job_id: str, names: Mapping[str, str | None]) -> Path:
    """``path`` with sbatch's replacement symbols filled in; one whose value is not known stays."""
    parent, _, task = job_id.partition("_")
    values = {**names, "%": "%", "A": parent, "a": task, "s": "batch", "t": "0", "n": "0"}

    def replace(match: re.Match[str]) -> str:
        value = values.get(match[2])
        if not value:
            return match[0]
        return value.zfill(min(int(match[1] or 0), 10)) if value.isdigit() else value

    return Path(_PATTERN.sub(replace, str(path)))
