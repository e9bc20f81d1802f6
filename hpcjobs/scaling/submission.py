"""Submit the runs of a study that are missing, and return without waiting for them."""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path

from msgspec.structs import replace

from hpcjobs.errors import RequestError
from hpcjobs.scaling import study as study_file
from hpcjobs.scaling.code_versions import current_code, read_code
from hpcjobs.scaling.run_list import list_runs
from hpcjobs.scaling.study import Study, StudyRun
from hpcjobs.scaling.study_sweep import define, undivided_batch
from hpcjobs.scheduler.outage import Report, discard
from hpcjobs.sweeps.cell_status import CellStatus, cell_statuses
from hpcjobs.sweeps.folder import Definition, SweepFolder
from hpcjobs.sweeps.submit import Outcome, connect_to
from hpcjobs.sweeps.sweep import Sweep
from hpcjobs.sweeps.sweep_index import open_folder


def submit_study(study: Study, path: Path, *, allow_mixed: bool = False, report: Report = discard) -> Study:
    """Submit every run of ``study`` that is missing; returns at once, with the study as it then stands.

    Runs that have completed, or may still complete, are not submitted again. A run that failed is measured anew, in a
    folder of its own.

    Raises:
        RequestError: the file holds another study, the program cannot be divided, or the code has changed since
            earlier runs. SchedulerError: refused.
    """
    known = study_file.read(path) if os.path.exists(path) else study
    if not known.points and not known.extends(study) and not _has_submissions(known):
        known = study  # nothing of the one in the file was submitted: it was refused
    if not known.extends(study):
        raise RequestError(
            f"{path} holds another study: {shlex.join(known.program)} on {known.site} ({known.mode})",
            hint="give this one another --name",
        )
    folder = _folder(known)
    usable = [] if folder is None else _usable_runs(folder)
    if (undivided := undivided_batch(study)) is not None:
        report(
            f"{undivided} is passed on as it is at every size; a strong study divides only --batch-size N. If it is"
            " the batch of one rank, the total work grows with the ranks: use --weak, or call the option --batch-size"
        )
    definition = define(study, [standing.cell for standing in usable], folder)
    if folder is not None and len(definition.cells) > len(usable) and not allow_mixed:
        _check_code(study, definition, folder, usable)
    if folder is None:
        folder = SweepFolder(Path(definition.job.run_root) / f"{definition.name}-{secrets.token_hex(4)}")
    current = replace(study, folder=str(folder.path), points=known.points)
    study_file.write(path, current)  # first: who is stopped half-way finds the folder
    outcome = Sweep(folder, definition).submit()
    current = replace(current, points=tuple(list_runs(current)))
    study_file.write(path, current)
    _report_submitted(outcome, current.points, report)
    return current


def sweep_of(study: Study) -> Sweep:
    """The sweep whose cells are the runs of a study.

    Raises:
        RequestError: nothing of it was submitted yet.
    """
    folder = _folder(study)
    if folder is None:
        raise RequestError(f"nothing of study {study.name} has been submitted")
    return Sweep(folder)


def _folder(study: Study) -> SweepFolder | None:
    """The folder of the study's sweep, if it is there."""
    if study.folder is None or not (Path(study.folder) / "sweep.json").exists():
        return None
    return open_folder(Path(study.folder))


def _has_submissions(study: Study) -> bool:
    """Whether the scheduler has taken a job of the study, or may have."""
    folder = _folder(study)
    if folder is None:
        return False
    return any(folder.entry(chunk) for chunk in folder.chunks()) or bool(_usable_runs(folder))


def _usable_runs(folder: SweepFolder) -> list[CellStatus]:
    """The runs that have completed, or may still complete."""
    known = cell_statuses(folder, connect_to(folder.definition), certain=True)
    return [standing for standing in known if not standing.to_run_again]


def _check_code(study: Study, definition: Definition, folder: SweepFolder, usable: list[CellStatus]) -> None:
    """Check that earlier runs were of the code that the next ones would run."""
    chunks = {standing.chunk.number for standing in usable if standing.chunk is not None}
    earlier = {code for number in chunks if (code := read_code(folder.chunk_dir(number))) is not None}
    now = current_code(Path(definition.job.chdir))
    if now is not None and earlier - {now}:
        raise RequestError(
            f"the code is {now}, but runs of {study.name} were made with {', '.join(sorted(earlier - {now}))}",
            hint="measure it anew under another --name, or --allow-mixed, which the report then says loudly",
        )


def _report_submitted(outcome: Outcome, runs: tuple[StudyRun, ...], report: Report) -> None:
    for entry in outcome.submitted:
        mine = [run for run in runs if run.job_dir == entry.run_dir]
        size, repeats = mine[0].size, ", ".join(str(run.repeat) for run in mine)
        report(f"job {entry.job_id}: {size.nodes} x {size.ntasks_per_node} ranks, repeat {repeats}")
    if outcome.waiting:
        report(f"{outcome.waiting} runs wait for room in the queue; a job of the study submits them")
