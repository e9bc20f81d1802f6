"""Changes jobs in the queue: cancel, hold, release, requeue, update, signal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs import guards
from hpcjobs.errors import RequestError, SchedulerDownError, SchedulerError, UnknownJobError, nearest
from hpcjobs.guards import Amounts
from hpcjobs.job.limits import check_change
from hpcjobs.job.models import Job
from hpcjobs.record import BATCH_SCRIPT
from hpcjobs.record.control import ControlDir
from hpcjobs.run.budget import most_of
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import (
    current_id,
    ends_by_task,
    find_started,
    keep_ends,
    note_requeue,
    own_ids,
    own_record,
    read_job_manifest,
    task_dir,
)
from hpcjobs.run.select import require_all_own
from hpcjobs.run.status import (
    Connect,
    Known,
    end_cancelled,
    is_ours,
    own_cluster,
    require_reachable,
    statuses,
    was_requeued_since,
    where_asked,
)
from hpcjobs.scheduler.base import JobRecord, Scheduler, State, connect
from hpcjobs.scheduler_kind import CLUSTER
from hpcjobs.site.library import policies_of_job
from hpcjobs.site.resources import FIELDS, Hours, Resources, gpus_in_gres, names_by_field, node_range
from hpcjobs.units import requested_time, slurm_time, task_ids, time_limit_s


class Cancelled(NamedTuple):
    """Result of a cancellation: each job is in one of the three."""

    cancelled: list[str]
    """Scheduler's ids of jobs that were alive."""
    ended: dict[str, State]
    """Jobs that had ended before, and how."""
    unknown: list[str]
    """Jobs that the scheduler does not know (any more)."""


def cancel(entries: Iterable[Entry], *, only: Collection[State] = (), connect: Connect = connect) -> Cancelled:
    """End the jobs that have not ended; one queue query and one cancelling command per scheduler.

    ``only``: those in one of these states, task by task of an array; none: whatever their state.

    The queue is asked first because an id alone may be another job's by now.

    Raises RequestError: one of them belongs to another host, cluster or user; then none is cancelled. SchedulerError:
    it does not answer, or refuses.
    """
    outcome = Cancelled([], {}, [])
    chosen = sorted(entries, key=where_asked)
    require_reachable(chosen)
    for (kind, conf), group in groupby(statuses(chosen, connect=connect), key=lambda known: where_asked(known.entry)):
        alive = [known for known in group if _alive(known, outcome)]
        require_all_own(alive)
        ids = [job_id for known in alive for job_id in known.ids(only)]
        if ids:
            noted = _note_cancelled(alive, only)
            waits = not only or State.PENDING in only
            waiting = [(known.entry, _find_waiting(known)) for known in alive] if waits else []
            try:
                connect(kind, conf or None).cancel(ids)
            except BaseException:
                _remove_notes(noted)
                raise
            outcome.cancelled.extend(ids)
            _keep_ends(waiting, connect)
    return outcome


class _Waiting(NamedTuple):
    """A task that waited as it was cancelled."""

    record: JobRecord
    written: JobRecord | None
    """What an earlier start of it had written."""

    def is_out_of_date(self, record: JobRecord) -> bool:
        """Whether the record, read since the task was cancelled, is of an earlier start."""
        is_written = self.written is not None and replace(self.written, reason=None) == replace(record, reason=None)
        return is_written or was_requeued_since(record, self.record)

    def end(self, written: JobRecord | None) -> JobRecord:
        """Its end, where Slurm has not told it: it may have started and ended, and ``written`` that, before it was
        cancelled.
        """
        before = None if self.written is None else self.written.started
        if written is not None and written.state.ended and written.started != before:
            return replace(written, source="nobody", submitted=self.record.submitted)
        return end_cancelled(self.record, time.time())


def _find_waiting(known: Known) -> dict[str, _Waiting]:
    """The entry's tasks that wait, by id. Tasks of an array share a record, which an entry of one task has too."""
    entry, own = known.entry, set(own_ids(known.entry))
    records = [record for record in known.records if record.state is State.PENDING and not entry.is_foreign]
    waiting = {task: record for record in records for task in task_ids(record.job_id) if task in own}
    written = {task: own_record(entry, task) for task in find_started(entry, list(waiting))}
    return {task: _Waiting(replace(record, job_id=task), written.get(task)) for task, record in waiting.items()}


def _keep_ends(waiting: Iterable[tuple[Entry, dict[str, _Waiting]]], connect: Connect) -> None:
    """Keep the ends of cancelled tasks that waited: they write none, and slurmctld forgets them, maybe at once.

    The accounting never hears of the task of an array that had not begun, while others of it go on.
    """
    cancelled = [(entry, tasks) for entry, tasks in waiting if tasks]
    now = statuses([entry for entry, _ in cancelled], connect=connect, errors=[])
    for (entry, tasks), (_, records) in zip(cancelled, now, strict=True):
        reported = {
            task
            for record in records
            for task in task_ids(record.job_id)
            if record.source != "nobody" and not (task in tasks and tasks[task].is_out_of_date(record))
        }
        forgotten = [(task, one) for task, one in tasks.items() if task not in reported]
        keep_ends(entry, [one.end(own_record(entry, task)) for task, one in forgotten])


def _note_cancelled(jobs: Iterable[Known], only: Collection[State]) -> list[ControlDir]:
    """Note for jobs that have begun that they are cancelled: each may request its own requeue just now.

    One that waits for another start writes no end: without accounting this note is all that is known soon.
    """
    noted = []
    for job in jobs:
        alive = (record for record in job.records if not record.state.ended)
        for control in _control_dirs(job, [record for record in alive if not only or record.state in only]):
            with suppress(OSError):  # a job without retries, or one that has not begun, has no such folder
                control.write_cancelled(time.time())
                noted.append(control)
    return noted


def _remove_notes(noted: Iterable[ControlDir]) -> None:
    for control in noted:
        with suppress(OSError):  # the job disregards it after minutes
            control.clear_cancelled()


def _control_dirs(job: Known, records: Iterable[JobRecord]) -> list[ControlDir]:
    if job.entry.is_foreign or not job.entry.kind.may_requeue:
        return []
    return [ControlDir(str(task_dir(Path(job.entry.run_dir), record.job_id))) for record in records]


def _alive(known: Known, outcome: Cancelled) -> bool:
    """Whether there is something to cancel; if not, the reason is added to ``outcome``."""
    states = [record.state for record in known.records]
    if any(not state.ended and state is not State.UNKNOWN for state in states):
        return True
    if all(state.ended for state in states):
        outcome.ended[known.ids()[0]] = next((s for s in states if s is not State.COMPLETED), State.COMPLETED)
    else:
        outcome.unknown.extend(known.ids())
    return False


Verb = Literal["hold", "release", "requeue"]
KEYS = names_by_field("update")
"""Options of a job that Slurm can change, and scontrol's names of them."""
FURTHER = (
    *("ArrayTaskThrottle", "BurstBuffer", "ClusterFeatures", "Contiguous", "CoreSpec", "DelayBoot", "EndTime"),
    *(
        "MinCPUsNode",
        "MinMemoryCPU",
        "MinMemoryNode",
        "MinTmpDiskNode",
        "NumCPUs",
        "NumTasks",
        "OverSubscribe",
        "Prefer",
    ),
    *("ResetAccrueTime", "Switches", "ThreadSpec"),
)
"""Further names of scontrol that are passed on. Excluded: names of other jobs (JobId), and the job's name, which
identifies its record in the accounting."""


def control(verb: Verb, entries: Iterable[Entry], *, connect: Connect = connect) -> list[str]:
    """Hold, release or requeue jobs; the ids that Slurm was given.

    Raises RequestError: a job of this machine, or of another host, cluster or user. UnknownJobError: Slurm does not
    know one of them. SchedulerError: Slurm refuses, or does not answer.
    """
    ids: list[str] = []
    for scheduler, known in _by_cluster(entries, verb, connect):
        chosen = [job_id for job in known for job_id in job.ids()]
        if verb == "requeue":
            _requeue(scheduler, known, chosen)
        else:
            {"hold": scheduler.hold, "release": scheduler.release}[verb](chosen)
        ids += chosen
    return ids


def _requeue(scheduler: Scheduler, known: list[Known], chosen: list[str]) -> None:
    guards.refuse_change("requeue")
    with ExitStack() as counted:
        for job in known:
            counted.enter_context(guards.count(job.entry.name or job.entry.job_id, _most_of_requeue(job)))
        noted = {control: control.cancelled_at for job in known for control in _control_dirs(job, job.records)}
        _remove_notes(noted)
        for job in known:
            note_requeue(job.entry, ends_by_task(job.records))
        try:
            scheduler.requeue(chosen)
        except SchedulerDownError:
            raise  # it may be requeued
        except SchedulerError as error:
            # Of several tasks or jobs, Slurm may have requeued some.
            if len(noted) == 1 or (len(chosen) == 1 and "invalid job id" in error.message.lower()):
                for job in known:
                    note_requeue(job.entry, ends_by_task(job.records), refused=True)
                for control, cancelled_at in noted.items():
                    if cancelled_at is not None:
                        with suppress(OSError):
                            control.write_cancelled(cancelled_at)
            raise


def update(entry: Entry, settings: Sequence[str], *, connect: Connect = connect) -> list[str]:
    """Change ``name=value`` settings of a job; scontrol's words for them.

    Names are the job's options (``time``), or scontrol's names or their beginnings (``TimeLimit``, ``timel``).

    Raises RequestError: Slurm cannot change this setting, its value is wrong, or a policy refuses it. Otherwise as
    `control`.
    """
    arguments = [_setting(setting) for setting in settings]
    for scheduler, known in _by_cluster([entry], "update", connect):
        alive = [record for record in known[0].records if not record.state.ended]
        check_settings(arguments, known[0].entry, alive[0].time_limit_s)
        _refuse_release(arguments, known[0], scheduler)
        with guards.count(entry.name or entry.job_id, _most_of_update(arguments, known[0].entry, alive)):
            scheduler.update(known[0].ids()[0], arguments)
    return arguments


def _refuse_release(settings: Sequence[str], job: Known, scheduler: Scheduler) -> None:
    """Refuse `Nice` of a held job: Slurm computes its priority anew, and 0, which holds it, would be lost."""
    if not any(setting.startswith(f"{KEYS['nice']}=") for setting in settings):
        return
    job_id = job.ids()[0]
    shown = scheduler.show_jobs([job_id])  # squeue joins the tasks of an array that wait, held or not
    held = [record.job_id for record in shown if record.is_held]
    if job.entry.task is not None:
        held = [job_id for tasks in held if job_id in task_ids(tasks)]
    if held:
        is_one = len(held) == 1 and "[" not in held[0]
        which, what, it = (held[0], "is held", "it") if is_one else (job_id, "has held tasks", "them")
        raise RequestError(
            f"update nice: {which} {what}, and Slurm would release {it}",
            hint=f"`hpcjobs release {which}` first, then change it",
        )


_HARMLESS = {
    *(key for field, key in KEYS.items() if FIELDS[field].hours is Hours.NONE and field != "requeue"),
    *("ArrayTaskThrottle", "BurstBuffer", "ClusterFeatures", "Contiguous", "DelayBoot", "MinMemoryCPU"),
    *("MinMemoryNode", "MinTmpDiskNode", "Prefer", "ResetAccrueTime", "Switches"),
}
"""Settings that let a job use no more node, CPU and GPU hours."""
_COUNTED = {KEYS[field] for field in ("time", "nodes", "nodelist", "constraint")}
_UNKNOWN = Amounts(1, math.inf, math.inf, math.inf)


def _most_of_requeue(known: Known) -> Amounts:
    """The most that the jobs use when they run once more; unknown for a job that hpcjobs did not submit."""
    if guards.budget_text() is None or known.entry.is_foreign:
        return _UNKNOWN
    job = _job_now(known.entry, known.records)
    array = ",".join(map(str, range(len(known.records)))) if len(known.records) > 1 else None
    limit_s = known.records[0].time_limit_s or job.time_limit_s
    return most_of(replace(job, retries=None, time_limit_s=limit_s, resources=replace(job.resources, array=array)))


def _most_of_update(settings: Sequence[str], entry: Entry, alive: list[JobRecord]) -> Amounts:
    """The most that a job uses with ``settings`` of scontrol in addition to its current limits."""
    names = [setting.partition("=")[0] for setting in settings]
    if guards.budget_text() is None or _HARMLESS.issuperset(names):
        return Amounts(0, 0, 0, 0)
    if entry.is_foreign or not (_HARMLESS | _COUNTED).issuperset(names):
        return _UNKNOWN._replace(jobs=0)
    limit_s = alive[0].time_limit_s
    job = replace(_job_now(entry, alive), time_limit_s=limit_s)
    now, after = most_of(job), most_of(_apply_settings(job, settings, limit_s))
    return Amounts(*(new if math.isinf(new) else max(0.0, new - old) for new, old in zip(after, now, strict=True)))


def _job_now(entry: Entry, records: Sequence[JobRecord]) -> Job:
    """The job of the manifest, with more nodes where the queue has more: an earlier update may have added them."""
    job = read_job_manifest(Path(entry.run_dir)).job
    most = max((record.nnodes or 0 for record in records), default=0)
    return replace(job, max_nodes=most, spare=0) if most > (job.max_nodes or job.nodes) + job.spare else job


def signal(
    entries: Iterable[Entry], name: str, *, only: Collection[State] = (), connect: Connect = connect
) -> list[str]:
    """Send a signal to the tasks of running jobs, and to a batch script itself; the ids that Slurm was given.

    Args:
        only: the states of jobs and tasks that get it; empty: all of them, and an ended one is an error.

    Raises:
        As `control`.
    """
    ids: list[str] = []
    for scheduler, known in _by_cluster(entries, "signal", connect, only=only):
        for job in known:
            is_script = job.entry.is_foreign or os.path.exists(os.path.join(job.entry.run_dir, BATCH_SCRIPT))
            chosen = job.ids(only)
            scheduler.signal(chosen, name, batch_script=is_script)
            ids += chosen
    return ids


def _by_cluster(
    entries: Iterable[Entry], verb: str, connect: Connect, *, only: Collection[State] = ()
) -> Iterable[tuple[Scheduler, list[Known]]]:
    """Group jobs by cluster, after asking each cluster for them: the id may belong to another job by now."""
    named = sorted(entries, key=where_asked)
    require_reachable(named)
    known = statuses(named, connect=connect)
    require_all_own(known)
    if only:
        known = [job for job in known if any(record.state in only for record in job.records)]
    if missing := [job.entry.job_id for job in known if all(r.state is State.UNKNOWN for r in job.records)]:
        raise UnknownJobError(f"{verb}: the scheduler does not know job {', '.join(missing)}")
    over = [job for job in known if all(r.state.ended for r in job.records)]
    if over and verb != "requeue":
        ends = (f"job {job.ids()[0]} has ended: {job.records[0].state.value}" for job in over)
        raise RequestError(f"{verb}: {'; '.join(ends)}")
    for job in over:
        _require_same(job, connect(job.entry.scheduler, job.entry.slurm_conf))
    return [
        (connect(kind, conf or None), list(group))
        for (kind, conf), group in groupby(known, key=lambda job: where_asked(job.entry))
    ]


def _require_same(job: Known, scheduler: Scheduler) -> None:
    """Refuse an ended job whose id the scheduler has given to another one; its end may be known from the run folder."""
    current = current_id(job.entry)
    records = scheduler.show_jobs({current})
    if records and not any(is_ours(job.entry, record) for record in records):
        raise UnknownJobError(
            f"requeue: the scheduler has forgotten job {job.entry.job_id} of {job.entry.run_dir}, "
            f"and its id belongs to another job: {records[0].command or records[0].name}"
        )


_TIMES = (KEYS["time"], KEYS["time_min"])


def _setting(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or any(char.isspace() and char != " " for char in text):
        raise RequestError(f"update {text!r}: no setting", hint="NAME=VALUE, such as time=2h")
    sign = name[-1:] if name.endswith(("+", "-")) else ""  # TimeLimit+=30
    name = name.removeprefix("--").rstrip("+-")
    key = KEYS.get(name.replace("-", "_")) or _find_key(name, text)
    if key in _TIMES:
        return f"{key}={_time(name, sign + value)}"
    if sign:
        raise RequestError(f"update {text}: only TimeLimit and TimeMin can be changed by an amount")
    return f"{key}={value}"


def _find_key(name: str, text: str) -> str:
    """scontrol's name that ``name`` is, or is the only beginning of, as scontrol reads it: in any case of letters."""
    keys = sorted({*KEYS.values(), *FURTHER})
    matches = [key for key in keys if name and key.lower().startswith(name.lower())]
    if exact := [key for key in matches if key.lower() == name.lower()]:
        return exact[0]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RequestError(f"update {text}: {name!r} may be {' or '.join(matches)}", hint="write more of the name")
    raise RequestError(f"update {text}: not changed by hpcjobs", hint=nearest(name, [*KEYS, *keys]))


def _time(field: str, value: str) -> str:
    """Convert ``2h`` to Slurm's spelling; ``+30m`` and ``-30m`` change the limit by 30 minutes."""
    sign, rest = (value[0], value[1:]) if value[:1] in ("+", "-") else ("", value)
    try:
        return sign + requested_time(rest)
    except ValueError as error:
        raise RequestError(f"update {field}: {error}") from error


def check_settings(settings: Sequence[str], entry: Entry, limit_s: float | None) -> None:
    """Compare the job of ``entry``, as ``settings`` of scontrol would change it, with the centre's policies.

    Args:
        limit_s: the time limit that the job has now; None: none.

    Raises RequestError: a policy refuses the change, or the job's manifest, which is needed for that, cannot be read.
    """
    policies = policies_of_job(entry.site, filter(None, (entry.cluster, own_cluster(CLUSTER, entry.slurm_conf))))
    if not policies or entry.is_foreign:  # without a manifest, the request was never checked
        return
    job = read_job_manifest(Path(entry.run_dir)).job
    check_change(job, _apply_settings(job, settings, limit_s), policies)


def _apply_settings(job: Job, settings: Sequence[str], limit_s: float | None) -> Job:
    """``job`` with ``settings`` of scontrol."""
    for setting in settings:
        name, _, value = setting.partition("=")
        for field in (field for field, key in KEYS.items() if key == name):
            job = _change(job, field, _new_limit(value, limit_s) if field == "time" else value)
    return job


def _change(job: Job, field: str, value: str) -> Job:
    """``job`` with ``field`` as scontrol is told to set it."""
    try:
        stated = msgspec.convert({field: value or None}, Resources, strict=False)
        fields = {
            name: new for name in Resources.__struct_fields__ if (new := getattr(stated, name)) is not msgspec.UNSET
        }
        if field == "gres" and gpus_in_gres(value)[0]:
            fields["gpus_per_node"] = int(str(fields["gpus_per_node"]).rpartition(":")[2])
        sources = job.sources | dict.fromkeys(fields, "update")
        job = replace(job, resources=replace(job.resources, **fields), sources=sources)
        if field == "nodes":
            least, most = node_range(value)
            return replace(job, nodes=least, max_nodes=most if most > least else None, spare=0)
        return replace(job, time_limit_s=time_limit_s(value)) if field == "time" else job
    except (ValueError, msgspec.ValidationError) as error:
        raise RequestError(f"update {field}: {error}") from error


def _new_limit(value: str, now_s: float | None) -> str:
    """The new time limit in Slurm's spelling; ``+`` and ``-`` change the current one."""
    sign, rest = (value[0], value[1:]) if value[:1] in ("+", "-") else ("", value)
    try:
        limit = requested_time(rest)
    except ValueError as error:
        raise RequestError(f"update time: {error}") from error
    if not sign:
        return limit
    step_s = time_limit_s(limit) or 0
    return "UNLIMITED" if now_s is None else slurm_time(max(60, round(now_s) + (step_s if sign == "+" else -step_s)))
