"""Plans of a sweep: one for each chunk (array), and one for the job that submits the rest once the queue has room."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.files import write_beside
from hpcjobs.job.limits import mandatory_options
from hpcjobs.job.models import Job, Plan
from hpcjobs.job.plan import plan_of
from hpcjobs.processes.programs import Runner, own_command, run
from hpcjobs.run import folder as run_folder
from hpcjobs.run.folder import code_state
from hpcjobs.site.resources import Resources, fields_where
from hpcjobs.slurm_commands import cluster_env, show_config
from hpcjobs.sweeps.cells import Cell, Program, make_program, shell_line
from hpcjobs.sweeps.folder import Chunk, Definition, SweepFolder

_LOCAL_TASKS = 10_000
_SLOTS_WORTH_SPLITTING = 8
"""With this many slots per chunk or more, chunks side by side idle less than one chunk after another."""


class Limits(NamedTuple):
    """The limits of one submission."""

    array_tasks: int
    """Tasks of one array: indices run from 0 to this, exclusive."""
    jobs: int | None = None
    """Jobs in the queue, array tasks counted one by one; None: no limit known."""


class Cut(NamedTuple):
    """One chunk: how many array tasks, how many of them at once, whether it waits for the chunk before it."""

    tasks: int
    throttle: int | None
    after_previous: bool


def read_limits(job: Job, *, max_submit_jobs: int | None, runner: Runner = run) -> Limits:
    """The limits where ``job`` runs: on a cluster one ``scontrol show config``; ``max_submit_jobs`` is the site's.

    Raises:
        SchedulerError: the controller did not answer.
    """
    if not job.kind.takes_sbatch_options:
        return Limits(_LOCAL_TASKS, max_submit_jobs)
    result = runner(show_config(), env=cluster_env(job.slurm_conf))
    if result.code != 0:
        raise SchedulerError(f"scontrol show config: {result.err.strip() or result.out.strip()}")
    return parse_config(result.out, jobs=max_submit_jobs)


def parse_config(text: str, *, jobs: int | None = None) -> Limits:
    """Limits in the output of ``scontrol show config``; ``jobs`` is the limit of the site file.

    Indices run from 0 to MaxArraySize - 1, so MaxArraySize tasks fit. MaxJobCount counts the jobs of all users.

    Raises:
        RequestError: the cluster has no job arrays.
    """
    settings = dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))
    tasks = int(settings.get("MaxArraySize", "1001"))
    if tasks < 1:
        raise RequestError(
            f"this cluster has no job arrays, which sweeps and scaling studies need: MaxArraySize is {tasks}"
            " (scontrol show config)",
            hint="submit the runs one by one: hpcjobs submit",
        )
    if fewer := re.search(r"\bmax_array_tasks=(\d+)", settings.get("SchedulerParameters", "")):
        tasks = min(tasks, int(fewer[1]))
    everybody = int(settings["MaxJobCount"]) - 1 if settings.get("MaxJobCount", "").isdigit() else None
    known = [limit for limit in (jobs, everybody) if limit is not None]
    return Limits(tasks, min(known, default=None))


def cuts(tasks: int, limits: Limits, *, max_parallel: int | None = None) -> list[Cut]:
    """``tasks`` array tasks as the fewest chunks that are allowed, never more than ``max_parallel`` running.

    Many slots are shared out over chunks that run side by side, sized by their share. Few are given to one
    chunk after another: split, a chunk with one slot would still run when all others are done.
    """
    most = limits.array_tasks
    if limits.jobs is not None:
        most = max(1, min(most, limits.jobs - 2))  # room for the job that submits the next chunk, and for its successor
    count = -(-tasks // most)
    if max_parallel is None or max_parallel >= tasks:
        return [Cut(size, None, False) for size in shares(tasks, count)]
    if count > 1 and max_parallel < count * _SLOTS_WORTH_SPLITTING:
        return [Cut(size, min(max_parallel, size), n > 0) for n, size in enumerate(shares(tasks, count))]
    slots = shares(max_parallel, count)
    sizes = _in_proportion(tasks, slots, most)
    return [Cut(size, min(slot, size), False) for size, slot in zip(sizes, slots, strict=True)]


def shares(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole numbers that differ by at most one, the larger first."""
    each, rest = divmod(total, parts)
    return [each + (part < rest) for part in range(parts)]


def _in_proportion(total: int, weights: Sequence[int], most: int) -> list[int]:
    """``total`` split as ``weights``, none above ``most`` (there is room: see `cuts`)."""
    sizes = [min(most, total * weight // sum(weights)) for weight in weights]
    for part in range(len(sizes)):
        extra = min(most - sizes[part], total - sum(sizes))
        sizes[part] += extra
    return sizes


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
            program = resolve_program(definition, size)
            write_beside(plan.run_dir / "cells.sh", "".join(shell_line(program, cell) for cell in part))
            write_beside(plan.run_dir / "chunk.json", msgspec.json.encode(chunk))
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
