"""Submitting the runs of a study: detached, and again only what is missing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Plan
from hpcjobs.job.plan import plan
from hpcjobs.run.adopt import adopted
from hpcjobs.run.folder import SUBMITTED, task_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.status import statuses
from hpcjobs.run.submit import submit
from hpcjobs.scaling import study as studies
from hpcjobs.scaling.code_versions import code_now, code_of
from hpcjobs.scaling.study import Point, Size, Study
from hpcjobs.scheduler.base import State
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.library import load_site

_BATCH = "--batch-size"
_GPU_OPTIONS = {"gpus_per_node", "gpus_per_task", "gpus", "gres"}
Say = Callable[[str], None]


class Wanted(NamedTuple):
    """Runs of one size that nobody has submitted yet, or whose jobs did not complete: one job, or one job array."""

    size: Size
    repeats: tuple[int, ...]


def measure(asked: Study, path: Path, *, allow_mixed: bool = False, say: Say = lambda text: None) -> Study:
    """Submit every run of ``asked`` that is missing; returns at once, with the study as it then stands.

    Each submission is written down before it is made, and its job after: the next call finds a job whose
    submitter was stopped in between.

    Raises:
        RequestError: the file holds another study, the program cannot be divided, or the code has changed since
            earlier runs. SchedulerError: refused.
    """
    known = studies.read(path) if os.path.exists(path) else asked
    if not known.asked_the_same(asked):
        raise RequestError(
            f"{path} holds another study: {shlex.join(known.program)} on {known.site} ({known.mode})",
            hint="give this one another --name",
        )
    current = msgspec.structs.replace(asked, points=_standing(known))
    plans = [(wanted, _plan(current, wanted)) for wanted in missing(current)]
    if plans and not allow_mixed:
        _same_code(current, plans[0][1])
    previous = entries(current)[-1].job_id if current.points else None
    for wanted, ready in plans:
        if current.one_at_a_time and previous is not None:
            ready = _plan(current, wanted, dependency=f"afterany:{previous}")
        prepared = [Point(size=wanted.size, repeat=n, job_id=None, run_dir=str(ready.run_dir)) for n in wanted.repeats]
        studies.write(path, msgspec.structs.replace(current, points=(*current.points, *prepared)))
        entry = submit(ready).entry
        previous = entry.job_id
        current = msgspec.structs.replace(current, points=(*current.points, *(_taken(p, entry) for p in prepared)))
        studies.write(path, current)
        repeats = ", ".join(map(str, wanted.repeats))
        say(f"job {entry.job_id}: {wanted.size.nodes} x {wanted.size.ntasks_per_node} ranks, repeat {repeats}")
    return current


def missing(study: Study) -> Iterator[Wanted]:
    """The runs that no point of the study measures, as they are submitted: all repeats of a size at once, as they
    run the same script; or one by one, repeat by repeat, so that a slow hour does not fall on one size alone."""
    known = {(point.size, point.repeat) for point in study.points}
    repeats = range(1, study.repeats + 1)
    every: list[tuple[Size, tuple[int, ...]]] = [(size, tuple(repeats)) for size in study.sizes]
    if study.one_at_a_time:
        every = [(size, (repeat,)) for repeat in repeats for size in study.sizes]
    for size, wanted in every:
        if lacking := tuple(repeat for repeat in wanted if (size, repeat) not in known):
            yield Wanted(size, lacking)


def entries(study: Study) -> list[Entry]:
    """The jobs of the study, point by point; of an array's task, the array's with the task said.

    Raises:
        ConfigError: no such site.
    """
    return [_entry(study, point) for point in study.points if point.job_id is not None]


def _entry(study: Study, point: Point) -> Entry:
    file = point.job_dir / SUBMITTED
    entry = msgspec.json.decode(file.read_bytes(), type=Entry) if file.exists() else _gone(study, point)
    return entry if entry.array is None else msgspec.structs.replace(entry, task=point.repeat)


def _gone(study: Study, point: Point) -> Entry:
    site, (job_id, _, task) = load_site(study.site), (point.job_id or "").partition("_")
    return Entry(
        job_id=job_id, name=study.name, site=site.name, scheduler=site.scheduler, run_dir=str(point.job_dir),
        submitted=0.0, slurm_conf=site.slurm_conf, array=task or None,
    )  # fmt: skip


def _standing(study: Study) -> tuple[Point, ...]:
    """The points whose jobs are done, or may still become it, and whose folders are there."""
    site = load_site(study.site)
    points = []
    for point in study.points:
        if point.job_id is None:
            entry = adopted(Path(point.run_dir), connect(site.scheduler, site.slurm_conf))
            point = point if entry is None else _taken(point, entry)
        if point.job_id is not None and point.job_dir.exists():
            points.append(point)
    known = statuses(_entry(study, point) for point in points)
    return tuple(p for p, job in zip(points, known, strict=True) if all(_hopeful(r.state) for r in job.records))


def _taken(point: Point, entry: Entry) -> Point:
    """The point, now that its job is known."""
    job_id = entry.job_id if entry.array is None else f"{entry.job_id}_{point.repeat}"
    return msgspec.structs.replace(point, job_id=job_id, run_dir=str(task_dir(Path(entry.run_dir), job_id)))


def _hopeful(state: State) -> bool:
    return state is State.COMPLETED or not state.ended


def _same_code(study: Study, ready: Plan) -> None:
    """Earlier runs were of the code that the next ones would run."""
    earlier = {code for point in study.points if (code := code_of(point.job_dir)) is not None}
    now = code_now(Path(ready.job.chdir))
    if now is not None and earlier - {now}:
        raise RequestError(
            f"the code is {now}, but runs of {study.name} were made with {', '.join(sorted(earlier - {now}))}",
            hint="measure it anew under another --name, or --allow-mixed, which the report then says loudly",
        )


def _plan(study: Study, wanted: Wanted, *, dependency: str | None = None) -> Plan:
    size = wanted.size
    options: dict[str, Any] = {"nodes": size.nodes, "ntasks_per_node": size.ntasks_per_node, **_gpus(study, size)}
    if dependency is not None:
        options["dependency"] = dependency
    if len(wanted.repeats) > 1:
        options["array"] = ",".join(map(str, wanted.repeats))
    return _planned(study, size, f"{study.name}-{size.nodes}x{size.ntasks_per_node}", options)


def _planned(study: Study, size: Size, name: str, options: dict[str, Any]) -> Plan:
    return plan(
        program_at(study.program, size, smallest=min(study.sizes), mode=study.mode),
        site=study.site,
        name=name,
        launcher=study.launcher,
        env=study.env,
        made_by=f"hpcjobs scale --name {study.name}",
        **{**study.options, **options},
    )


def _gpus(study: Study, size: Size) -> dict[str, int]:
    """A GPU for each rank, where jobs of the site have GPUs; nothing where the study says itself what it asks for.

    Raises:
        RequestError: the study asks for fewer GPUs than ranks, which would then measure each other.
    """
    ranks, asked = size.ntasks_per_node, study.options.get("gpus_per_node")
    if isinstance(asked, int) and 0 < asked < ranks:
        raise RequestError(
            f"{ranks} ranks on a node would share {asked} GPU{'s' * (asked > 1)} (--gpus-per-node {asked})",
            hint="leave --gpus-per-node out: each size then asks for a GPU per rank",
        )
    if not _GPU_OPTIONS.isdisjoint(study.options):
        return {}
    usual = _planned(study, size, study.name, {"nodes": size.nodes}).job.resources.gpus_per_node
    return {"gpus_per_node": ranks} if usual else {}


def program_at(program: Sequence[str], size: Size, *, smallest: Size, mode: str) -> list[str]:
    """The program of one point: ``{nodes}`` and ``{ranks}`` filled in, and with strong scaling ``--batch-size``
    divided, so that the global batch is that of the smallest size.

    Raises:
        RequestError: the batch size cannot be divided evenly.
    """
    filled = [word.replace("{nodes}", str(size.nodes)).replace("{ranks}", str(size.ranks)) for word in program]
    if mode == "weak" or _BATCH not in filled[:-1]:
        return filled
    at = filled.index(_BATCH) + 1
    if not filled[at].isdigit():
        return filled
    total = int(filled[at]) * smallest.ranks
    if total % size.ranks:
        raise RequestError(
            f"a global batch of {total} cannot be shared evenly by {size.ranks} ranks",
            hint=f"{_BATCH} is of one rank at the smallest size; or --weak, which keeps it",
        )
    return [*filled[:at], str(total // size.ranks), *filled[at + 1 :]]
