"""Plans of a sweep: one for each chunk (array), and one for the job that submits the rest once the queue has room."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hpcjobs.files import write_beside
from hpcjobs.job.limits import mandatory_options
from hpcjobs.job.models import Plan
from hpcjobs.job.plan import plan_of
from hpcjobs.processes.programs import own_command
from hpcjobs.run import folder as run_folder
from hpcjobs.run.folder import code_state
from hpcjobs.site.resources import Resources, fields_where
from hpcjobs.sweeps.cells import Cell, Program, make_program, shell_line
from hpcjobs.sweeps.folder import Chunk, Definition, SweepFolder
from hpcjobs.sweeps.limits import Cut, Limits, cuts


def start_after(plan: Plan, job_ids: Sequence[str]) -> Plan:
    """``plan``, with the condition that these jobs have ended, with success or without."""
    if not job_ids:
        return plan
    earlier = plan.job.resources.dependency
    dependency = ",".join([*([earlier] if earlier else []), ":".join(["afterany", *job_ids])])
    job = replace(plan.job, resources=replace(plan.job.resources, dependency=dependency))
    *options_before, script = plan.command
    options = [f"--dependency={dependency}"] if job.kind.takes_sbatch_options else []
    return plan._replace(job=job, command=(*options_before, *options, script))


def prepare(folder: SweepFolder, definition: Definition, cells: Sequence[Cell], limits: Limits) -> list[Chunk]:
    """Make the chunks that hold ``cells``: everything but their submission.

    An array has one size of job. If the number of tasks at once is limited, arrays of several sizes run one after
    another, in the order of the cells.
    """
    code = code_state(Path(definition.job.chdir))
    number, chunks = folder.next_number(), list[Chunk]()
    in_turn = bool(definition.sizes) and definition.max_parallel is not None
    for size, same in itertools.groupby(cells, key=lambda cell: cell.size):
        for part, cut in _parts(list(same), definition, limits):
            after = number - 1 if cut.after_previous or (in_turn and number > 1) else None
            chunk = Chunk(number=number, cells=[cell.id for cell in part], pack=definition.pack, after=after, size=size)
            throttle = "" if cut.throttle is None else f"%{cut.throttle}"
            plan = _chunk_plan(folder, definition, chunk, f"0-{cut.tasks - 1}{throttle}")
            run_folder.create(plan, code)
            _fill(plan.run_dir, resolve_program(definition, size), part, chunk)
            chunks.append(chunk)
            number += 1
    return chunks


def _parts(cells: Sequence[Cell], definition: Definition, limits: Limits) -> Iterator[tuple[Sequence[Cell], Cut]]:
    """The cells of each array, for cells of one size."""
    pack, start = definition.pack, 0
    most = None if definition.max_parallel is None else definition.max_parallel // definition.pack_parallel
    for cut in cuts(-(-len(cells) // pack), limits, max_parallel=most):
        yield cells[start : start + cut.tasks * pack], cut
        start += cut.tasks * pack


def resolve_program(definition: Definition, size: str = "") -> Program:
    """The program that cells of this size run: in another image another Python starts it."""
    job = definition.job_of(size)
    own = {name: value for name, value in job.env.items() if f"env.{name}" in job.sources}
    return make_program(job, env=own, passing=definition.passing)


def _chunk_plan(folder: SweepFolder, definition: Definition, chunk: Chunk, array: str) -> Plan:
    job = definition.job_of(chunk.size)
    packing = {"HPCJOBS_PACK": str(chunk.pack), "HPCJOBS_LANES": str(min(chunk.pack, definition.pack_parallel))}
    env = job.env | {"HPCJOBS_SWEEP": str(folder.path)} | packing
    run_dir = folder.chunk_dir(chunk.number)
    job = replace(job, env=env, resources=replace(job.resources, array=array), run_root=str(run_dir.parent))
    return plan_of(job, run_dir, made_by=definition.made_by)


def _fill(run_dir: Path, program: Program, cells: Sequence[Cell], chunk: Chunk) -> None:
    write_beside(run_dir / "cells.sh", "".join(shell_line(program, cell) for cell in cells))
    write_beside(run_dir / "chunk.json", msgspec.json.encode(chunk))


def tail_plan(folder: SweepFolder, definition: Definition, run_dir: Path, *, begin: str | None) -> Plan:
    """The plan of a small job of the same account that submits the remaining chunks."""
    job, requested = definition.job, definition.job.resources
    resources = Resources(**dict.fromkeys(requested.__struct_fields__))
    shared = {field: getattr(requested, field) for field in fields_where("shared")}
    own = {"nodes": 1, "ntasks_per_node": 1, "cpus_per_task": 1, "time": "10m", "begin": begin}
    small = replace(replace(resources, **own, **shared), **mandatory_options(job))
    command = tuple(own_command("sweep", "continue", str(folder.path)))
    job = replace(
        job, name=f"{definition.name}-next", argv=command, template="job", snapshot=False, nodes=1, ntasks_per_node=1,
        launcher="srun" if job.kind.runs_steps else "spawn", resources=small, run_root=str(run_dir.parent),
    )  # fmt: skip
    return plan_of(job, run_dir, made_by=definition.made_by)
