"""Finds the files that the output of a job goes to."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.job.options import is_batch_script, read_batch_script
from hpcjobs.scheduler.base import Scheduler
from hpcjobs.scheduler.slurm.parse import Table, TableRow, read_shown
from hpcjobs.slurm_commands import (
    list_accounted,
    show_job,
)

_SUBMISSION: Final = Table(("JobID", "JobIDRaw", "JobName", "User", "WorkDir", "SubmitLine"))
_PATTERN = re.compile(r"%(\d*)([%AajJNnstux])")
_STATED = {
    "output": re.compile(r"(?:-o|--outp?u?t?[= ])[ ]*(\S+)"),
    "error": re.compile(r"(?:-e|--err?o?r?[= ])[ ]*(\S+)"),
}
_SRUN = re.compile(r"(?:^|[\s;&|(])srun\s(?P<options>[^;&|]*)")
_OF_STEP = re.compile(r"(?:^|\s)(?:-[oe][= ]?|--(?:outp?u?t?|err?o?r?)[= ])\s*[\"']?([^\s\"']+)")
_ID_VARIABLE = re.compile(r"\$(?:SLURM_JOB_?ID\b|\{SLURM_JOB_?ID\})")
_SYMBOLS = {"t": r"(?P<rank>\d{1,6})", "n": r"\d+"}
_DEFAULT, _DEFAULT_OF_TASK = "slurm-%j.out", "slurm-%A_%a.out"


def output_file(slurm: Scheduler, job_id: str) -> Path | None:
    """The file of job or array task ``job_id``; None: neither slurmctld nor the accounting knows it.

    slurmctld forgets a job some minutes after its end. Then the file comes from the options of the recorded sbatch
    command, or from the ``#SBATCH`` lines in the current text of its script, or is sbatch's default.
    """
    try:
        shown = read_shown(slurm.query(show_job(job_id)).splitlines()[0])
    except (SchedulerError, IndexError):
        shown = {}
    if path := TableRow(shown).name("StdOut"):
        return _expand(Path(path), job_id, {"x": shown.get("JobName"), "j": shown.get("JobId")})
    row = _submission(slurm, job_id)
    return None if row is None else _from_accounting(row, job_id)


def accounted_files(slurm: Scheduler, job_id: str) -> list[Path]:
    """The files of standard output and error of a job that slurmctld has forgotten, as far as the accounting shows."""
    row = _submission(slurm, job_id)
    if row is None:
        return []
    error = _stated_file(row.name("SubmitLine") or "", Path(row.name("WorkDir") or "."), "error")
    return [_from_accounting(row, job_id), *([_from_accounting(row, job_id, error)] if error else [])]


def find_script(slurm: Scheduler, job_id: str) -> tuple[Path, Path] | None:
    """The current batch script of a job and the job's first folder; None: no such file."""
    try:
        shown = read_shown(slurm.query(show_job(job_id)).splitlines()[0])
        folder, arguments = Path(shown.get("WorkDir") or "."), (shown.get("Command") or "").split()
    except (SchedulerError, IndexError):
        row = _submission(slurm, job_id)
        folder, arguments = Path("." if row is None else row.name("WorkDir") or "."), []
        if row is not None:
            arguments = (row.name("SubmitLine") or "").partition(" --wrap")[0].split()[1:]
    return next(((folder / argument, folder) for argument in arguments if is_batch_script(folder / argument)), None)


def files_of_steps(script: Path, *, job_id: str, name: str | None, folder: Path) -> Iterator[tuple[Path, int | None]]:
    """The files that a batch script's ``srun -o`` and ``-e`` have written, each with the rank that ``%t`` stands for.

    Names with shell variables other than ``$SLURM_JOB_ID`` are left out: only bash knows the values.
    """
    try:
        text = script.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    except OSError:
        return
    for line in text.splitlines():
        srun = None if line.lstrip().startswith("#") else _SRUN.search(line)
        for stated in _OF_STEP.findall(srun["options"]) if srun else []:
            pattern = _ID_VARIABLE.sub(job_id, stated)
            if "$" in pattern:
                continue
            pieces = re.split(r"%\d*([JNnst])", str(folder / pattern))
            pieces[::2] = [_fill(piece, job_id, {"x": name, "j": job_id}) for piece in pieces[::2]]
            form = "".join(
                _SYMBOLS.get(piece, ".*") if odd % 2 else re.escape(piece) for odd, piece in enumerate(pieces)
            )
            for path in sorted(glob.glob("*".join(map(glob.escape, pieces[::2])))):
                if (match := re.fullmatch(form, path)) and Path(path).is_file():
                    yield Path(path), int(match["rank"]) if match.re.groups else None


def _submission(slurm: Scheduler, job_id: str) -> TableRow | None:
    """The job's row; the rows of an array that had the id before may come first."""
    try:
        rows = list(_SUBMISSION.rows(slurm.query(list_accounted(*_SUBMISSION, jobs=[job_id], siblings=True))))
    except SchedulerError:
        return None
    return next((row for row in rows if row.raw("JobID") == job_id), rows[0] if rows else None)


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
    return Path(_fill(str(path), job_id, names))


def _fill(text: str, job_id: str, names: Mapping[str, str | None]) -> str:
    """``text`` with sbatch's replacement symbols filled in; unknown ones stay."""
    parent, _, task = job_id.partition("_")
    values = {**names, "%": "%", "A": parent, "a": task, "s": "batch", "t": "0", "n": "0"}

    def replace(match: re.Match[str]) -> str:
        value = values.get(match[2])
        if not value:
            return match[0]
        return value.zfill(min(int(match[1] or 0), 10)) if value.isdigit() else value

    return _PATTERN.sub(replace, text)
