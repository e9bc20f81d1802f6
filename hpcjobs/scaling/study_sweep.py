"""A study as a sweep: its cells are sizes and repeats, and each size has a job of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.job.plan import resolve_request
from hpcjobs.scaling.study import Size, Study
from hpcjobs.site.library import load_site
from hpcjobs.sweeps.cells import Cell
from hpcjobs.sweeps.chunk_plans import resolve_program
from hpcjobs.sweeps.folder import Definition, SweepFolder
from hpcjobs.sweeps.spec import TEMPLATE, check_cells

_BATCH_PARAM = "batch_size"
_BATCH = re.compile(r"--batch[-_]?size(?:=(.*))?", re.DOTALL)
_OTHER_BATCH = re.compile(r"[-\w.+]*batch[-_]?size[-\w.]*(?:=.*)?|-b|--?bs(?:=.*)?", re.DOTALL | re.IGNORECASE)
"""Options that may name a batch size: which part of it, of a rank or of all, their names do not tell for certain."""
_GPU_OPTIONS = {"gpus_per_node", "gpus_per_task", "gpus", "gres"}


def define(study: Study, known: Sequence[Cell], folder: SweepFolder | None) -> Definition:
    """The sweep that measures ``study``: the runs in ``known``, and a new cell for each that is missing there.

    Raises:
        RequestError: a size does not fit the site, its ranks would share GPUs, or the batch cannot be divided.
    """
    cells = {key(cell): cell for cell in known}
    smallest = min([*study.sizes, *(size for size, _ in cells)], key=lambda size: (size.ranks, size))
    for size, repeat in _keys(study):
        params = _params(study, size, repeat, smallest)
        new = Cell(id=_cell_id(size, repeat, folder), params=params, size=str(size))
        cell = cells[size, repeat] = cells.pop((size, repeat), new)  # in the order of the study
        if cell.params != params:
            raise RequestError(
                f"runs of {size} (nodes x tasks per node) had a --batch-size of"
                f" {cell.params.get(_BATCH_PARAM) or 'the program, not divided'};"
                f" with {smallest} as the smallest size it would be {params.get(_BATCH_PARAM)}",
                hint="sizes below the smallest one measured need a study of their own: another --name",
            )
    earlier = folder.definition.sizes if folder is not None and known else {}
    jobs = earlier | {str(size): _job(study, size) for size in study.sizes}
    first = jobs[str(study.sizes[0])]
    definition = Definition(
        name=f"study-{study.name}", job=first, sizes=jobs, cells=list(cells.values()), made_by=_made_by(study),
        passing="env", max_parallel=1 if study.one_at_a_time else None,
        max_submit_jobs=load_site(study.site).max_submit_jobs,
    )  # fmt: skip
    if not study.options.get("no_check"):
        check_cells(resolve_program(definition), definition.cells)
    return definition


def key(cell: Cell) -> tuple[Size, int]:
    """Size and repeat of a cell."""
    nodes, ntasks_per_node, repeat = (int(cell.params[name] or 0) for name in ("nodes", "ntasks_per_node", "repeat"))
    return Size(nodes=nodes, ntasks_per_node=ntasks_per_node), repeat


def _keys(study: Study) -> Iterator[tuple[Size, int]]:
    """Size by size, so that the repeats of a size are one array; one at a time, repeat by repeat, so that a slow hour
    does not fall on one size alone."""
    repeats = range(1, study.repeats + 1)
    if study.one_at_a_time:
        return ((size, repeat) for repeat in repeats for size in study.sizes)
    return ((size, repeat) for size in study.sizes for repeat in repeats)


def _cell_id(size: Size, repeat: int, folder: SweepFolder | None) -> str:
    """``2x4-1``, and ``2x4-1-attempt2`` once that has failed: in the folder of the failed run it would resume that."""
    first = f"{size}-{repeat}"
    ids = itertools.chain([first], (f"{first}-attempt{number}" for number in itertools.count(2)))
    return next(name for name in ids if folder is None or not folder.cell_dir(name).exists())


def _params(study: Study, size: Size, repeat: int, smallest: Size) -> dict[str, str | None]:
    params: dict[str, str | None] = {
        "nodes": str(size.nodes),
        "ntasks_per_node": str(size.ntasks_per_node),
        "ranks": str(size.ranks),
        "repeat": str(repeat),
    }
    if (batch := _find_batch(study)) is not None:
        params[_BATCH_PARAM] = str(_share(batch, smallest.ranks, size))
    return params


class _Batch(NamedTuple):
    """The option of a program that is the batch size of one rank."""

    option: str
    position: int
    """Of the value among the arguments."""
    prefix: str
    """``--batch-size=``, where the value is in one argument with the option."""
    value: int


def _find_batch(study: Study) -> _Batch | None:
    """The batch size of one rank at the smallest size, where it is to be divided; None: the program stays as it is."""
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
    """Argument of a strong study that looks like a batch size and is the same at all sizes; None: there is none."""
    if study.mode == "weak" or _find_batch(study) is not None or any("{" in argument for argument in study.program):
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


def _job(study: Study, size: Size) -> Job:
    return _resolve(study, size, _gpus(study, size))


def _resolve(study: Study, size: Size, gpus: dict[str, int]) -> Job:
    sizes = {"nodes": size.nodes, "ntasks_per_node": size.ntasks_per_node, **gpus}
    options: dict[str, Any] = {**study.options, **sizes}
    return resolve_request(
        _program(study),
        site=study.site,
        name=f"{study.name}-{size}",
        template=TEMPLATE,
        launcher=study.launcher,
        env=study.env,
        sbatch=study.sbatch,
        srun=study.srun,
        **options,
    )


def _made_by(study: Study) -> str:
    return f"hpcjobs scale --name {study.name}"


def _gpus(study: Study, size: Size) -> dict[str, int]:
    """A GPU for each rank, where jobs of the site have GPUs; nothing where the study itself asks for GPUs.

    Raises:
        RequestError: the study asks for fewer GPUs than ranks, which would then measure each other.
    """
    ranks, requested = size.ntasks_per_node, study.options.get("gpus_per_node")
    if isinstance(requested, int) and 0 < requested < ranks:
        raise RequestError(
            f"{ranks} ranks on a node would share {requested} GPU{'s' * (requested > 1)} (--gpus-per-node {requested})",
            hint="leave --gpus-per-node out: each size then asks for a GPU per rank",
        )
    if not _GPU_OPTIONS.isdisjoint(study.options):
        return {}
    usual = _resolve(study, Size(nodes=size.nodes, ntasks_per_node=1), {}).resources.gpus_per_node
    return {"gpus_per_node": ranks} if usual else {}
