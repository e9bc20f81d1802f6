"""Submit the missing cells of a sweep: each once, also after a crash, and never more than the queue takes.

A plan for each chunk (array), and one for the job that submits the rest once the queue has room.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import HpcJobsWarning, RequestError, SchedulerDownError, SchedulerError
from hpcjobs.files import write_beside
from hpcjobs.job.limits import mandatory_options
from hpcjobs.job.models import Job, Plan
from hpcjobs.job.plan import plan_of
from hpcjobs.processes.programs import Runner, own_command, run
from hpcjobs.run import control
from hpcjobs.run import folder as run_folder
from hpcjobs.run.folder import code_state
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import covers_tasks, current_id, read_submitted
from hpcjobs.run.status import is_queued, kept_or_written, owner_elsewhere, require_reachable
from hpcjobs.run.submission import plan_in
from hpcjobs.run.submit import hand_over
from hpcjobs.scheduler.base import JobQueue, QueueReadOnce, Scheduler, State, connect
from hpcjobs.site.resources import Resources, fields_where
from hpcjobs.slurm_commands import check_submission, show_config
from hpcjobs.sweeps.cell_status import CellStatus, adopt_chunk, cell_statuses, tail_is_queued, without_held
from hpcjobs.sweeps.cells import Cell, Program, make_program, shell_line
from hpcjobs.sweeps.folder import NOBODY, Chunk, Definition, SweepFolder
from hpcjobs.units import count_tasks, format_count

_TAILS = "next-*"
"""Run folders of the jobs that submit the rest."""
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

    Raises SchedulerDownError: the controller does not answer, for some seconds.
    """
    if not job.kind.takes_sbatch_options:
        return Limits(_LOCAL_TASKS, max_submit_jobs)
    answer = connect(job.scheduler, job.slurm_conf, runner=runner).query(show_config())
    return parse_config(answer, jobs=max_submit_jobs)


def parse_config(text: str, *, jobs: int | None = None) -> Limits:
    """Limits in the output of ``scontrol show config``; ``jobs`` is the limit of the site file.

    Indices run from 0 to MaxArraySize - 1, so MaxArraySize tasks fit. MaxJobCount counts the jobs of all users.

    Raises RequestError: the cluster has no job arrays.
    """
    settings = dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))
    tasks = int(settings.get("MaxArraySize") or "1001")
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


# Slurm has one generic text for all limits of accounts and QOS, and prints the limit's name next to it.
_LIMIT = re.compile(r"\b(?:Assoc|QOS)[A-Z]\w+")
_COUNT = re.compile(r"Submit", re.IGNORECASE)
_FULL = re.compile(r"MaxSubmit|job submit limit|MaxJobCount|temporarily unable to accept job", re.IGNORECASE)


def may_be_full(message: str) -> bool:
    """Whether a refusal can come from the number of jobs in the queue."""
    limits = _LIMIT.findall(message)
    return any(map(_COUNT.search, limits)) if limits else _FULL.search(message) is not None


def names_the_count(message: str) -> bool:
    """Whether a refusal can only come from the number of jobs in the queue."""
    return may_be_full(message) and (bool(_LIMIT.search(message)) or "job submit limit" not in message)


def largest_array(plan: Plan, tasks: int, *, runner: Runner = run) -> int:
    """The most tasks of an array, up to ``tasks``, that sbatch would accept now; 0: none.

    ``sbatch --test-only`` checks the limits of account and QOS without submitting.

    Raises SchedulerDownError: the controller does not answer.
    """
    slurm = connect(plan.job.scheduler, plan.job.slurm_conf, runner=runner)
    _, *options, script = plan.command
    options = [option for option in options if option != "--parsable"]

    def is_accepted(count: int) -> bool:
        argv = check_submission(*options, f"--array=0-{count - 1}", script)
        try:
            slurm.query(argv, cwd=plan.job.chdir)
        except SchedulerDownError:
            raise
        except SchedulerError:
            return False
        return True

    return bisect.bisect_right(range(1, tasks + 1), False, key=lambda count: not is_accepted(count))


_LATER = "now+5minutes"
_LEAST_ROOM = 2
"""Jobs: one array task, and the job that submits the next."""


class Outcome(NamedTuple):
    """The result of one submission."""

    submitted: list[Entry]
    cells: int
    """Cells in these arrays."""
    waiting: int
    """Cells that the sweep itself will submit when the queue has room."""
    done: int
    open: int
    """Cells that were queued or running before."""


def start(folder: SweepFolder, definition: Definition, *, function: bytes | None = None) -> Outcome:
    """Write the definition, and submit its cells that are neither completed, queued nor running.

    Raises SchedulerError: the scheduler refused or did not answer; arrays that it accepted before stay recorded.
    """
    folder.make()
    with folder.lock():
        if not definition.sizes:  # a study replaces the cells of runs that failed
            _warn_of_left_out(folder, definition)
        folder.write_definition(definition)
        if function is not None:
            write_beside(folder.path / "function.pkl", function)
        return _submit_missing(folder, definition, QueueReadOnce(connect_to(definition)))


def _warn_of_left_out(folder: SweepFolder, definition: Definition) -> None:
    """Warn of cells of an earlier command that are none of ``definition``: nobody counts or resumes them any more."""
    if not (folder.path / "sweep.json").exists():
        return
    left_out = {cell.id for cell in folder.definition.cells} - {cell.id for cell in definition.cells}
    if left_out:
        cells = format_count(len(left_out), "cell")
        warnings.warn(
            f"{cells} of an earlier command are no part of sweep {definition.name} any more: status, results and resume"
            f" leave them out; their jobs go on (`hpcjobs sweep cancel {shlex.quote(definition.name)}` ends them too)",
            HpcJobsWarning,
            stacklevel=3,
        )


def resume(folder: SweepFolder) -> Outcome:
    """Submit the cells that failed or are missing."""
    folder.require_own()
    definition = folder.definition
    with folder.lock():
        return _submit_missing(folder, definition, QueueReadOnce(connect_to(definition)))


def look(folder: SweepFolder) -> Outcome:
    """The arrays that were submitted before and the state of their cells, without a new submission."""
    chunks = [(chunk, entry) for chunk in folder.chunks() if (entry := folder.entry(chunk)) is not None]
    return _outcome(chunks, folder, cell_statuses(folder, connect_to(folder.definition)))


def submit_waiting(folder: SweepFolder) -> Outcome:
    """Submit the chunks that the queue had no room for. The sweep's own job calls this."""
    folder.require_own()
    definition = folder.definition
    with folder.lock():
        scheduler = QueueReadOnce(connect_to(definition))
        return _outcome(_submit_prepared(folder, definition, scheduler, _limits(definition)), folder, [])


def cancel(folder: SweepFolder) -> list[str]:
    """End every array of the sweep and submit no more; return the ids that were cancelled."""
    folder.require_own()
    definition = folder.definition
    with folder.lock():
        require_here(folder)
        scheduler = QueueReadOnce(connect_to(definition))
        queue = scheduler.queue()
        entries = [folder.entry(chunk) or adopt_chunk(folder, chunk, scheduler) for chunk in folder.chunks()]
        for chunk in _unsubmitted_chunks(folder):
            folder.give_up(chunk)
        queued = [entry for entry in [*entries, *_tails(folder)] if entry is not None and is_queued(entry, queue)]
        return control.cancel(queued).cancelled


def _tails(folder: SweepFolder) -> Iterator[Entry | None]:
    """The jobs that submit, or have submitted, the rest; also one that is held, and has a successor."""
    return map(read_submitted, sorted(folder.path.glob(_TAILS)))


def require_here(folder: SweepFolder) -> None:
    """Refuse a sweep whose jobs may wait or run on another host or cluster with this home: they would run twice.

    Raises RequestError: there is such a job, and it has not written its end.
    """
    entries = [*map(folder.entry, folder.chunks()), *_tails(folder)]
    elsewhere = [entry for entry in entries if entry is not None and owner_elsewhere(entry) is not None]
    require_reachable(entry for entry in elsewhere if not _has_ended(entry))


def _has_ended(entry: Entry) -> bool:
    """Whether each task wrote its end, or has one on record: one that was cancelled while it waited writes none."""
    records = kept_or_written(entry)
    return covers_tasks(entry, records) and all(record.state.ended for record in records)


def connect_to(definition: Definition) -> Scheduler:
    """The scheduler of the sweep's arrays."""
    return connect(definition.job.scheduler, definition.job.slurm_conf)


def _limits(definition: Definition) -> Limits:
    return read_limits(definition.job, max_submit_jobs=definition.max_submit_jobs)


def _submit_missing(folder: SweepFolder, definition: Definition, scheduler: JobQueue) -> Outcome:
    require_here(folder)
    if not tail_is_queued(folder, scheduler):
        for chunk in _unsubmitted_chunks(folder):
            if adopt_chunk(folder, chunk, scheduler) is None and folder.give_up(chunk) != NOBODY:
                adopt_chunk(folder, chunk, scheduler)
    now = cell_statuses(folder, scheduler, certain=True)
    to_submit = [cell_status.cell for cell_status in now if cell_status.to_run_again]
    if not to_submit:
        return _outcome([], folder, now)
    limits = _limits(definition)
    prepare(folder, definition, to_submit, limits)
    return _outcome(_submit_prepared(folder, definition, scheduler, limits), folder, now)


def _unsubmitted_chunks(folder: SweepFolder) -> list[Chunk]:
    return [chunk for chunk in folder.chunks() if folder.entry(chunk) is None and folder.owner(chunk) != NOBODY]


class _UnsubmittedChunk(NamedTuple):
    """The first chunk that was not submitted."""

    chunk: Chunk
    room: int
    """Jobs that the queue takes, as far as the known limit says; meaningless after a refusal."""
    refusal: SchedulerError | None


def _submit_prepared(
    folder: SweepFolder, definition: Definition, scheduler: JobQueue, limits: Limits
) -> list[tuple[Chunk, Entry]]:
    """Submit the prepared chunks in order while there is room, then the job that will submit the rest.

    Raises SchedulerError: Slurm refused for another reason than the number of jobs in the queue. RequestError: the
    queue is too small for this sweep, or full.
    """
    room = _room(limits, scheduler, sum(chunk.tasks for chunk in _unsubmitted_chunks(folder)))
    taken, stop = _submit_in_order(folder, scheduler, room)
    if stop is not None and not taken and not _queued_arrays(folder, scheduler):
        # No array of this sweep will end and make room for the next one. A smaller one may fit.
        jobs = stop.room if stop.refusal is None else largest_array(_plan(folder, stop.chunk), stop.chunk.tasks)
        if jobs < _LEAST_ROOM:
            _check_that_waiting_helps(folder, definition, scheduler, stop, jobs)
        elif stop.chunk.tasks > 1:
            # The job that submits the rest must leave room for its successor.
            folder.write_definition(replace(definition, max_submit_jobs=jobs + _queued_tasks(scheduler)))
            _cut_again(folder, definition, limits._replace(jobs=jobs))
            taken, stop = _submit_in_order(folder, scheduler, jobs)
    if stop is not None:
        _submit_tail(folder, definition, scheduler, [entry.job_id for _, entry in taken])
    return taken


def _submit_in_order(
    folder: SweepFolder, scheduler: JobQueue, room: int | None
) -> tuple[list[tuple[Chunk, Entry]], _UnsubmittedChunk | None]:
    """Submit the prepared chunks one after the other, up to the first that the queue has no room for.

    ``room``: jobs that the queue takes; None: not known.
    """
    waiting = _unsubmitted_chunks(folder)
    taken: list[tuple[Chunk, Entry]] = []
    for chunk in waiting:
        last = chunk is waiting[-1]
        if room is not None and chunk.tasks + (0 if last else 1) > room:
            return taken, _UnsubmittedChunk(chunk, room, None)
        before = [entry.job_id for earlier, entry in taken if earlier.number == chunk.after]
        if chunk.after is not None and not before:  # an earlier call submitted it
            before = _queued_arrays(folder, scheduler)
        try:
            taken.append((chunk, hand_over(start_after(_plan(folder, chunk), before), scheduler).entry))
        except SchedulerError as error:
            if not may_be_full(error.message):
                raise
            return taken, _UnsubmittedChunk(chunk, 0, error)
        room = None if room is None else room - chunk.tasks
    return taken, None


def _check_that_waiting_helps(
    folder: SweepFolder, definition: Definition, scheduler: JobQueue, stop: _UnsubmittedChunk, jobs: int
) -> None:
    """Raise unless room in the queue will come when other jobs end."""
    unclear = jobs == 0 and stop.refusal is not None and not names_the_count(stop.refusal.message)
    # Where the text does not name the limit, a small job shows whether the queue is full.
    if stop.refusal is not None and unclear and _takes_a_small_job(folder, definition):
        raise stop.refusal
    tail = folder.tail()
    if all(tail is not None and is_queued(tail, [record]) for record in scheduler.queue()):
        refusal_text = f": {stop.refusal.message}" if stop.refusal is not None else ""
        raise RequestError(
            f"sweep {definition.name}: the queue takes {jobs} of your jobs although no other job of yours is there,"
            f" and a sweep needs {_LEAST_ROOM}: an array task, and the job that submits the next array{refusal_text}",
            hint=f"hpcjobs sweep resume {shlex.quote(definition.name)}"
            " once the account may have more jobs (MaxSubmitJobs)",
        )


def _takes_a_small_job(folder: SweepFolder, definition: Definition) -> bool:
    probe = tail_plan(folder, definition, folder.path / "probe", begin=_LATER)
    run_folder.create(probe, None)
    try:
        return largest_array(probe, 1) == 1
    finally:
        run_folder.remove(probe)


def _cut_again(folder: SweepFolder, definition: Definition, limits: Limits) -> None:
    """Replace the prepared chunks by smaller ones."""
    waiting = {cell for chunk in _unsubmitted_chunks(folder) if folder.give_up(chunk) == NOBODY for cell in chunk.cells}
    prepare(folder, definition, [cell for cell in definition.cells if cell.id in waiting], limits)


def _plan(folder: SweepFolder, chunk: Chunk) -> Plan:
    return plan_in(folder.chunk_dir(chunk.number))


def _room(limits: Limits, scheduler: JobQueue, to_submit: int) -> int | None:
    """How many more jobs the queue takes; looked up only when it could be too few."""
    if limits.jobs is None or to_submit < limits.jobs // 2:
        return None
    return limits.jobs - _queued_tasks(scheduler)


def _queued_tasks(scheduler: JobQueue) -> int:
    return sum(count_tasks(record.job_id) for record in scheduler.queue())


def _submit_tail(folder: SweepFolder, definition: Definition, scheduler: JobQueue, after: Sequence[str]) -> None:
    """Submit the job that submits the rest: it starts after the queued arrays, or without any in five minutes.

    One such job waits at a time: several, of several commands, would fill a short queue, and follow each other
    for ever.
    """
    tail, this_job = folder.tail(), os.environ.get("HPCJOBS_JOB_ID")  # which an old answer of the queue has waiting
    waiting = [record for record in without_held(scheduler.queue()) if record.state is State.PENDING]
    if tail is not None and this_job not in (tail.job_id, current_id(tail)) and is_queued(tail, waiting):
        return
    number = sum(1 for _ in folder.path.glob(_TAILS)) + 1
    alive = after or _queued_arrays(folder, scheduler)
    begin = None if alive else _LATER
    plan = tail_plan(folder, definition, folder.path / f"next-{number:03d}", begin=begin)
    run_folder.create(plan, code_state(Path(plan.job.chdir)))
    try:
        entry = hand_over(start_after(plan, alive), scheduler).entry
    except SchedulerError as error:
        raise RequestError(
            f"the queue is full, also for the job that would submit the rest of {definition.name}: {error.message}",
            hint=f"hpcjobs sweep resume {shlex.quote(definition.name)}"
            " later; max_submit_jobs in the site file leaves room in time",
        ) from error
    folder.write_tail(entry)


def _queued_arrays(folder: SweepFolder, scheduler: JobQueue) -> list[str]:
    """The sweep's arrays that are in the queue."""
    entries, queue = (folder.entry(chunk) for chunk in folder.chunks()), scheduler.queue()
    return sorted({entry.job_id for entry in entries if entry is not None and is_queued(entry, queue)})


def _outcome(taken: Sequence[tuple[Chunk, Entry]], folder: SweepFolder, before: Sequence[CellStatus]) -> Outcome:
    return Outcome(
        submitted=[entry for _, entry in taken],
        cells=sum(len(chunk.cells) for chunk, _ in taken),
        waiting=sum(len(chunk.cells) for chunk in _unsubmitted_chunks(folder)),
        done=sum(cell_status.state is State.COMPLETED for cell_status in before),
        open=sum(cell_status.open for cell_status in before),
    )
