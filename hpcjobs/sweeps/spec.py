"""The request for a sweep: job, points and how many at once, from a YAML file or flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from hpcjobs.errors import RequestError
from hpcjobs.job.models import JobSpec, Layer
from hpcjobs.job.plan import plan
from hpcjobs.job.program import check_trainer, split_module
from hpcjobs.job.project import split_programs
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Frozen, Site
from hpcjobs.site.yaml_file import read_yaml
from hpcjobs.sweeps.cells import (
    Cell,
    Passing,
    Point,
    Program,
    axis_of,
    check_count,
    check_points,
    command,
    from_csv,
    grid_of,
    make_cell,
    sample,
    zip_,
)
from hpcjobs.sweeps.folder import Definition
from hpcjobs.sweeps.submit import resolve_program

TEMPLATE = "sweep"


class Sampling(Frozen, frozen=True):
    """Random points: ``space`` holds lists to choose from, and ``{low, high, log}``."""

    n: int
    space: dict[str, list[Any] | Span]
    seed: int = 0


class Span(Frozen, frozen=True):
    """A range of numbers; ``log``: uniform in the logarithm."""

    low: int | float
    high: int | float
    log: bool = False


class SweepSpec(JobSpec, frozen=True):
    """A job spec with points. One of ``grid``, ``zip``, ``sample``, ``csv``, ``cells``, or several that are crossed."""

    grid: dict[str, list[Any]] = {}
    zip: dict[str, list[Any]] = {}
    sample: Sampling | None = None
    csv: str | None = None
    cells: list[dict[str, Any]] = []
    max_parallel: int | None = None
    pack: int | None = None
    pack_parallel: int | None = None
    passing: Passing | None = None


def read_spec(path: Path) -> SweepSpec:
    """The sweep in a YAML file.

    Raises ConfigError: the file is wrong.
    """
    return read_yaml(path, SweepSpec, what="sweep file", prepare=split_programs)


def make_points(spec: SweepSpec, sets: Sequence[str] = (), *, beside: Path | None = None) -> list[Point]:
    """The points of a file and of ``--set`` flags, crossed with each other; ``csv`` is relative to ``beside``.

    Raises RequestError: no points, or names that clash.
    """
    axes: dict[str, list[Any]] = {}
    for name, values in map(axis_of, sets):
        axes[name] = [*axes.get(name, []), *values]
    parts: list[list[Point]] = []
    if spec.grid or axes:
        parts.append(grid_of(spec.grid | axes))
    if spec.zip:
        parts.append(zip_(**spec.zip))
    if spec.sample is not None:
        space = {name: _axis(axis) for name, axis in spec.sample.space.items()}
        parts.append(sample(spec.sample.n, spec.sample.seed, **space))
    if spec.csv is not None:
        parts.append(from_csv((beside or Path()) / spec.csv))
    if spec.cells:
        parts.append(list(spec.cells))
    if not parts:
        raise RequestError("no parameters to sweep", hint="--set lr=0.1,0.01, or grid: in the --sweep file")
    check_count(*map(len, parts))
    crossed: list[Point] = [{}]
    for part in parts:
        crossed = [{**left, **right} for left in crossed for right in part]
    return check_points(crossed)


def _axis(axis: list[Any] | Span) -> Any:
    if isinstance(axis, list):
        return axis
    return (axis.low, axis.high, "log") if axis.log else (axis.low, axis.high)


def define(
    request: JobSpec,
    points: Sequence[Point],
    *,
    site: str | Site | None = None,
    spec: Layer | None = None,
    max_parallel: int | None = None,
    pack: int = 1,
    pack_parallel: int = 1,
    passing: Passing | None = None,
    made_by: str = "hpcjobs.sweep",
) -> Definition:
    """The sweep of the job in ``request``, with ``spec`` as the layer below it. No file is written.

    Raises ConfigError: a file is wrong. RequestError: the job does not fit the site, or a point is illegal.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    for option, value in (("pack", pack), ("pack_parallel", pack_parallel), ("max_parallel", max_parallel)):
        if value is not None and value < 1:
            raise RequestError(f"{option}={value}: must be 1 or more")
    if max_parallel is not None and max_parallel < pack_parallel:
        raise RequestError(
            f"pack_parallel={pack_parallel} cells of one array task are more than max_parallel={max_parallel}"
        )
    below = JobSpec() if spec is None else spec.spec
    if request.resources.array or below.resources.array:
        raise RequestError("a sweep makes its own arrays: leave array out")
    cell_request = replace(
        request,
        template=request.template or below.template or TEMPLATE,
        retries=request.retries or below.retries or "off",  # a site's are for single jobs
    )
    job = plan(cell_request, where, spec=spec, made_by=made_by).job
    if job.name.startswith("-"):
        raise RequestError(
            f"sweep {job.name!r}: every command would take this name for an option",
            hint="begin it with a letter or a digit: --name NAME",
        )
    if job.retries is not None and pack > 1:
        raise RequestError(
            f"pack={pack}: a cell that starts again by itself has an array task of its own",
            hint="leave out either --pack or --retries",
        )
    if pack_parallel > 1 and (job.ntasks > 1 or job.launcher not in ("srun", "spawn")):
        raise RequestError(
            f"pack_parallel={pack_parallel} is for cells of one task started by srun or spawn;"
            f" these have {job.ntasks}, started by {job.launcher}",
            hint="--pack alone runs the cells of an array task one after the other",
        )
    definition = Definition(
        name=job.name, job=job, cells=[], made_by=made_by, passing=passing, max_parallel=max_parallel,
        max_submit_jobs=where.max_submit_jobs, pack=pack, pack_parallel=pack_parallel,
    )  # fmt: skip
    what = resolve_program(definition)
    cells = {cell.id: cell for cell in (make_cell(what, point) for point in check_points(points))}
    if not (request.no_check or below.no_check):
        check_cells(what, cells.values())
    return replace(definition, cells=list(cells.values()))


def check_cells(program: Program, cells: Iterable[Cell]) -> None:
    """Check the flags of a bundled trainer's cells: each value of each parameter once.

    Raises RequestError: the trainer would refuse a cell.
    """
    if not program.trainer:
        return
    checked: set[tuple[str, str | None]] = set()
    for cell in cells:
        if not checked or not checked.issuperset(cell.params.items()):
            checked.update(cell.params.items())
            call = split_module(command(program, cell))
            assert call is not None
            check_trainer(call[0].rpartition(".")[2], call[1])


def job_layer(path: Path, spec: SweepSpec) -> Layer:
    """The part of a sweep file that describes one job."""
    fields = asdict(spec)
    return Layer(str(path), JobSpec(**{name: fields[name] for name in JobSpec.__struct_fields__}))
