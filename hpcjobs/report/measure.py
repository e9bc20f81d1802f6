"""Submitting the runs of a study: detached, and again only what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Plan
from hpcjobs.job.plan import plan
from hpcjobs.report import study as studies
from hpcjobs.report.study import Point, Size, Study
from hpcjobs.run.index import Entry
from hpcjobs.run.status import statuses
from hpcjobs.run.submit import submit
from hpcjobs.scheduler.base import State
from hpcjobs.site.library import load_site

_BATCH = "--batch-size"
Say = Callable[[str], None]


class Wanted(NamedTuple):
    """A run that nobody has submitted yet, or whose job did not complete."""

    size: Size
    repeat: int


def measure(asked: Study, path: Path, *, say: Say = lambda text: None) -> Study:
    """Submit every run of ``asked`` that is missing; returns at once, with the study as it then stands.

    Runs are ordered repeat by repeat, so that a slow hour does not fall on one size alone. With
    ``one_at_a_time`` each starts when the one before has ended, however it ended.

    Raises:
        RequestError: the file holds another study, or the program cannot be divided. SchedulerError: refused.
    """
    known = studies.read(path) if path.exists() else asked
    if not known.asked_the_same(asked):
        raise RequestError(
            f"{path} holds another study: {shlex.join(known.program)} on {known.site} ({known.mode})",
            hint="give this one another --name",
        )
    sound = tuple(point for point, good in zip(known.points, _good(known), strict=True) if good)
    current = msgspec.structs.replace(asked, points=sound)
    plans = [(wanted, _plan(current, wanted)) for wanted in missing(current)]
    previous = current.points[-1].job_id if current.points else None
    for wanted, ready in plans:
        if current.one_at_a_time and previous is not None:
            ready = _plan(current, wanted, dependency=f"afterany:{previous}")
        handle = submit(ready)
        previous = handle.id
        point = Point(size=wanted.size, repeat=wanted.repeat, job_id=handle.id, run_dir=str(handle.run_dir))
        current = msgspec.structs.replace(current, points=(*current.points, point))
        studies.write(path, current)
        where = f"{wanted.size.nodes} x {wanted.size.ntasks_per_node} ranks, repeat {wanted.repeat}"
        say(f"job {handle.id}: {where}")
    return current


def missing(study: Study) -> Iterator[Wanted]:
    """The runs that no point of the study measures."""
    known = {(point.size, point.repeat) for point in study.points}
    for repeat in range(1, study.repeats + 1):
        for size in study.sizes:
            if (size, repeat) not in known:
                yield Wanted(size, repeat)


def entries(study: Study) -> list[Entry]:
    """The jobs of the study, point by point.

    Raises:
        ConfigError: a run folder is gone.
    """
    found = []
    for point in study.points:
        file = Path(point.run_dir) / "submitted.json"
        found.append(msgspec.json.decode(file.read_bytes(), type=Entry) if file.exists() else _gone(study, point))
    return found


def _gone(study: Study, point: Point) -> Entry:
    site = load_site(study.site)
    return Entry(
        job_id=point.job_id, name=study.name, site=site.name, scheduler=site.scheduler, run_dir=point.run_dir,
        submitted=0.0, slurm_conf=site.slurm_conf,
    )  # fmt: skip


def _good(study: Study) -> list[bool]:
    """Whether each point's job is done, or may still become it, and its run folder is there."""
    if not study.points:
        return []
    known = statuses(entries(study))
    hopeful = [all(_hopeful(record.state) for record in job.records) for job in known]
    return [good and Path(point.run_dir).exists() for good, point in zip(hopeful, study.points, strict=True)]


def _hopeful(state: State) -> bool:
    return state is State.COMPLETED or not state.ended


def _plan(study: Study, wanted: Wanted, *, dependency: str | None = None) -> Plan:
    size = wanted.size
    options: dict[str, Any] = {**study.options, "nodes": size.nodes, "ntasks_per_node": size.ntasks_per_node}
    if dependency is not None:
        options["dependency"] = dependency
    return plan(
        program_at(study.program, size, smallest=min(study.sizes), mode=study.mode),
        site=study.site,
        name=f"{study.name}-{size.nodes}x{size.ntasks_per_node}-{wanted.repeat}",
        made_by=f"hpcjobs scale --name {study.name}",
        **options,
    )


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
