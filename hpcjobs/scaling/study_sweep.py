"""A study as a sweep: its cells are sizes and repeats, each size is a job; submission and list of its runs."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.files import file_name, read_regular
from hpcjobs.job.models import Job
from hpcjobs.job.plan import resolve_request
from hpcjobs.record import MANIFEST
from hpcjobs.record.manifest import Manifest, read_manifest
from hpcjobs.run.folder import code_state
from hpcjobs.scaling import study as study_file
from hpcjobs.scaling.study import Size, Study, StudyRun
from hpcjobs.scheduler.base import Report, discard
from hpcjobs.site.library import load_site
from hpcjobs.site.resources import FIELDS, GPU_FIELDS
from hpcjobs.sweeps.cell_status import CellStatus, cell_statuses
from hpcjobs.sweeps.cells import Cell
from hpcjobs.sweeps.folder import Definition, SweepFolder, open_folder
from hpcjobs.sweeps.spec import TEMPLATE, check_cells
from hpcjobs.sweeps.submit import Outcome, connect_to, resolve_program
from hpcjobs.sweeps.sweep import Sweep

_BATCH_PARAM = "batch_size"
_BATCH = re.compile(r"--batch[-_]?size(?:=(.*))?", re.DOTALL)
_OTHER_BATCH = re.compile(r"[-\w.+]*batch[-_]?size[-\w.]*(?:=.*)?|-b|--?bs(?:=.*)?", re.DOTALL | re.IGNORECASE)
"""Options that may name a batch size: which part of it, of a rank or of all, their names do not tell for certain."""
_GPU_OPTIONS = {*GPU_FIELDS, "gres"}


def define(study: Study, known: Sequence[Cell], folder: SweepFolder | None) -> Definition:
    """The sweep that measures ``study``: the runs in ``known``, and a new cell for each that is missing there.

    Raises RequestError: a size does not fit the site, its ranks would share GPUs, or the batch cannot be divided.
    """
    cells = {key(cell): cell for cell in known}
    smallest = min([*study.sizes, *(size for _, size, _ in cells)], key=lambda size: (size.ranks, size))
    series = study.series
    for name, size, repeat in _keys(study):
        params = _params(study, series[name], size, repeat, smallest)
        new = Cell(id=_cell_id(name, size, repeat, folder), params=params, size=_job_key(name, size))
        cell = cells[name, size, repeat] = cells.pop((name, size, repeat), new)  # in the order of the study
        if cell.params != params:
            raise RequestError(
                f"runs of {size} (nodes x tasks per node) had a --batch-size of"
                f" {cell.params.get(_BATCH_PARAM) or 'the program, not divided'};"
                f" with {smallest} as the smallest size it would be {params.get(_BATCH_PARAM)}",
                hint="sizes below the smallest one measured need a study of their own: another --name",
            )
    earlier = folder.definition.sizes if folder is not None and known else {}
    jobs = earlier | {
        _job_key(name, size): _job(_at(study, point), size) for name, point in series.items() for size in study.sizes
    }
    first = jobs[_job_key(next(iter(series)), study.sizes[0])]
    definition = Definition(
        name=f"study-{study.name}", job=first, sizes=jobs, cells=list(cells.values()),
        made_by=f"hpcjobs scale --name {study.name}",
        passing="env", max_parallel=1 if study.one_at_a_time else None,
        max_submit_jobs=load_site(study.site).max_submit_jobs,
    )  # fmt: skip
    if not study.options.get("no_check"):
        check_cells(resolve_program(definition), definition.cells)
    return definition


def key(cell: Cell) -> tuple[str, Size, int]:
    """Series, size and repeat of a cell."""
    nodes, ntasks_per_node, repeat = (int(cell.params[name] or 0) for name in ("nodes", "ntasks_per_node", "repeat"))
    return cell.params.get(_SERIES) or "", Size(nodes=nodes, ntasks_per_node=ntasks_per_node), repeat


def _job_key(series: str, size: Size) -> str:
    """Key of `Definition.sizes`."""
    return f"{size} {series}" if series else str(size)


def _at(study: Study, point: dict[str, str]) -> Study:
    """``study`` with the job's options of one series.

    Raises RequestError: an axis is neither an option of a job nor a ``{NAME}`` of the program.
    """
    options: dict[str, str | int | bool | None] = {}
    launcher = study.launcher
    for name, value in point.items():
        if name == "launcher":
            launcher = value
        elif name in FIELDS or name == "container":
            options[name] = value
        elif not any(f"{{{name}}}" in argument for argument in study.program):
            raise RequestError(
                f"axis {name}: no option of a job has this name, and the program has no {{{name}}}",
                hint=f"write {{{name}}} where the program takes the value",
            )
    return replace(study, options={**study.options, **options}, launcher=launcher)


def _keys(study: Study) -> Iterator[tuple[str, Size, int]]:
    """Size by size, so that the repeats of a size are one array; one at a time, repeat by repeat, so that a slow hour
    does not fall on one size alone."""
    repeats = range(1, study.repeats + 1)
    if study.one_at_a_time:
        return ((name, size, repeat) for repeat in repeats for name in study.series for size in study.sizes)
    return ((name, size, repeat) for name in study.series for size in study.sizes for repeat in repeats)


def _cell_id(series: str, size: Size, repeat: int, folder: SweepFolder | None) -> str:
    """``2x4-1``, and ``2x4-1-attempt2`` once that has failed: in the folder of the failed run it would resume that."""
    first = f"{size}-{repeat}"
    if series:
        digest = hashlib.sha256(series.encode()).hexdigest()[:6]
        first = f"{size}-{file_name(series)[:60]}-{digest}-{repeat}"
    ids = itertools.chain([first], (f"{first}-attempt{number}" for number in itertools.count(2)))
    return next(name for name in ids if folder is None or not folder.cell_dir(name).exists())


def _params(study: Study, point: dict[str, str], size: Size, repeat: int, smallest: Size) -> dict[str, str | None]:
    params: dict[str, str | None] = {
        "nodes": str(size.nodes),
        "ntasks_per_node": str(size.ntasks_per_node),
        "ranks": str(size.ranks),
        "repeat": str(repeat),
    }
    if point:
        params |= {**point, _SERIES: ", ".join(f"{name}={value}" for name, value in point.items())}
    if (batch := _find_batch(study)) is not None:
        params[_BATCH_PARAM] = str(_share(batch, smallest.ranks, size))
    elif study.mode == "strong" and (value := point.get(_BATCH_PARAM, "")).isdecimal():
        own = _Batch(_BATCH_PARAM, 0, "", int(value))
        params[_BATCH_PARAM] = str(_share(own, smallest.ranks, size))
    return params


_SERIES: Final = "series"


class _Batch(NamedTuple):
    """The option of a program that is the batch size of one rank."""

    option: str
    position: int
    """Position of the value among the arguments."""
    prefix: str
    """``--batch-size=``, where the value is in one argument with the option."""
    value: int


def _find_batch(study: Study) -> _Batch | None:
    """The batch size of one rank at the smallest size, if it is divided; None: the arguments do not change."""
    if study.mode == "weak":
        return None
    for position, argument in reversed(list(enumerate(study.program))):  # of two, the last one counts
        option, equals, value = argument.partition("=")
        if not _BATCH.fullmatch(argument):
            continue
        if not equals:
            position, value = position + 1, "".join(study.program[position + 1 : position + 2])
        if value.isdecimal():
            return _Batch(option, position, f"{option}{equals}" if equals else "", int(value))
    return None


def undivided_batch(study: Study) -> str | None:
    """Argument of a strong study that looks like a batch size and is the same at all sizes, or None."""
    if (
        study.mode == "weak"
        or _find_batch(study) is not None
        or _BATCH_PARAM in study.axes
        or any("{" in argument for argument in study.program)
    ):
        return None
    return next((argument for argument in study.program[1:] if _OTHER_BATCH.fullmatch(argument)), None)


def _share(batch: _Batch, ranks: int, size: Size) -> int:
    global_batch = batch.value * ranks
    if global_batch % size.ranks:
        raise RequestError(
            f"a global batch of {global_batch} cannot be shared evenly by {size.ranks} ranks",
            hint=f"{batch.option} is of one rank at the smallest size; or --weak, which keeps it",
        )
    return global_batch // size.ranks


def _program(study: Study) -> list[str]:
    """The program, with a place for the batch size of each size."""
    arguments = list(study.program)
    if (batch := _find_batch(study)) is not None:
        arguments[batch.position] = f"{batch.prefix}{{{_BATCH_PARAM}}}"
    return arguments


def _job(study: Study, size: Size, gpus: dict[str, int] | None = None) -> Job:
    """The job of a size; ``gpus``: its option for them, by default `_gpus`."""
    sizes = {"nodes": size.nodes, "ntasks_per_node": size.ntasks_per_node}
    options: dict[str, Any] = {**study.options, **sizes, **(_gpus(study, size) if gpus is None else gpus)}
    return resolve_request(
        _program(study),
        site=study.site,
        name=f"{study.name}-{size}",
        template=TEMPLATE,
        launcher=study.launcher,
        env=study.env,
        sbatch=study.sbatch,
        srun=study.srun,
        metric=study.metric,
        **options,
    )


def _gpus(study: Study, size: Size) -> dict[str, int]:
    """One GPU per rank, if jobs of the site have GPUs; empty if the study requests GPUs itself.

    Raises RequestError: the study asks for fewer GPUs than ranks, which would then measure each other.
    """
    ranks, requested = size.ntasks_per_node, study.options.get("gpus_per_node")
    if isinstance(requested, int) and 0 < requested < ranks:
        raise RequestError(
            f"{ranks} ranks on a node would share {requested} GPU{'s' * (requested > 1)} (--gpus-per-node {requested})",
            hint="leave --gpus-per-node out: each size then asks for a GPU per rank",
        )
    if not _GPU_OPTIONS.isdisjoint(study.options):
        return {}
    usual = _job(study, Size(nodes=size.nodes, ntasks_per_node=1), {}).resources.gpus_per_node
    return {"gpus_per_node": ranks} if usual else {}


def list_runs(study: Study) -> list[StudyRun]:
    """Every run, in the order of submission, without a question to the scheduler.

    Raises ConfigError: their folder is not there.
    """
    if study.folder is None:
        return []
    if not (Path(study.folder) / "sweep.json").exists():
        raise ConfigError(
            f"the runs of study {study.name} are not in {study.folder}: it has no sweep.json",
            hint="the same hpcjobs scale command measures them again",
        )
    folder = SweepFolder(Path(study.folder))
    tasks: dict[str, tuple[str, str]] = {}
    for chunk in folder.chunks():
        if (entry := folder.entry(chunk)) is not None:
            tasks |= {cell: (f"{entry.job_id}_{line}", entry.run_dir) for line, cell in enumerate(chunk.cells)}
    runs = []
    for cell in folder.definition.cells:
        series, size, repeat = key(cell)
        job_id, job_dir = tasks.get(cell.id, (None, None))
        run_dir = str(folder.cell_dir(cell.id))
        runs.append(StudyRun(size=size, repeat=repeat, job_id=job_id, run_dir=run_dir, job_dir=job_dir, series=series))
    return runs


def read_code(job_dir: Path) -> str | None:
    """The code of a run, from its run folder: ``commit``, or ``commit + patch DIGEST``; None: not known."""
    manifest = _read(job_dir)
    if manifest is None or manifest.code is None:
        return None
    patch = job_dir / "code.patch"
    return _label(manifest.code.commit, read_regular(patch) if patch.is_file() else b"")


def current_code(folder: Path) -> str | None:
    """The current code in ``folder``, in the same form; None outside a repository."""
    state = code_state(folder)
    return None if state is None else _label(state.commit, state.patch.encode("utf-8", "surrogateescape"))


def read_image(job_dir: Path) -> str | None:
    """The container image of a run; None: it had none."""
    manifest = _read(job_dir)
    inside = None if manifest is None else manifest.request.container
    return None if inside is None else f"{inside['name']} {inside['fingerprint'] or inside['image']}"


def _read(job_dir: Path) -> Manifest[dict[str, Any]] | None:
    return read_manifest(job_dir) if (job_dir / MANIFEST).exists() else None


def _label(commit: str | None, patch: bytes) -> str:
    changed = f" + patch {hashlib.sha256(patch).hexdigest()[:8]}" if patch else ""
    return f"{(commit or 'no commit')[:12]}{changed}"


def submit_study(study: Study, path: Path, *, allow_mixed: bool = False, report: Report = discard) -> Study:
    """Submit every run of ``study`` that is missing; returns at once, with the study as it then stands.

    Runs that have completed, or may still complete, are not submitted again. A failed run is measured again, in a
    new folder.

    Raises RequestError: the file holds another study, the program cannot be divided, or the code has changed since
    earlier runs. SchedulerError: refused.
    """
    known = study_file.read(path) if os.path.exists(path) else study
    if not known.points and not known.extends(study) and not _has_submissions(known):
        known = study  # the study in the file was refused: it has no jobs
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
    """The sweep that runs a study: one cell per run.

    Raises RequestError: the study was not submitted yet.
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
        series = f", {mine[0].series}" if mine[0].series else ""
        report(f"job {entry.job_id}: {size.nodes} x {size.ntasks_per_node} ranks{series}, repeat {repeats}")
    if outcome.waiting:
        report(f"{outcome.waiting} runs wait for room in the queue; a job of the study submits them")
