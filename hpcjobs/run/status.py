"""Finds the status of jobs with as few questions to the scheduler as possible.

The job's own state file is read first. One squeue covers every job that is still alive, one sacct every job that has
ended and was never accounted for; the accounted records are kept in the run folder. A record counts only where it is
surely about the entry's job, and for an entry of another host, cluster or user no scheduler is asked here.

A job id alone says little. Two clusters or two hosts with one home give out the same ids, and a controller that lost
its state begins again at 1. So a job is its scheduler, cluster or host, id, submit time, user and run folder; a record
that does not fit belongs to another job: it is never shown, used, or cancelled.
"""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import RequestError, SchedulerDownError, SchedulerError
from hpcjobs.files import user_name
from hpcjobs.record import JOB_SCRIPT
from hpcjobs.record.control import Continuation, ControlDir
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import (
    CLOCK_TOLERANCE_S,
    FINAL_AFTER_S,
    all_ended,
    are_final,
    continuation,
    covers_tasks,
    current_id,
    drop_ends,
    find_started,
    is_closed,
    keep_accounting,
    keep_ends,
    may_be_requeued,
    own_ids,
    own_record,
    own_records,
    read_attempts,
    read_ends,
    read_state,
    task_dir,
    tasks_of,
    write_continuation,
)
from hpcjobs.scheduler.base import (
    JobQueue,
    JobRecord,
    QueueReadOnce,
    Scheduler,
    State,
    connect,
    reachable_clusters,
)
from hpcjobs.slurm_commands import fold_stored, read_hosts
from hpcjobs.units import form_of, parent_id, task_ids


def own_cluster(scheduler: str, slurm_conf: str | None) -> str | None:
    """The cluster or host that a job submitted now belongs to; None: not one name, or none that can be learnt."""
    names = reachable_clusters(scheduler, slurm_conf)
    return next(iter(names)) if len(names) == 1 else None


def is_reachable(entry: Entry) -> bool:
    """Whether this user reaches the job's scheduler from here."""
    return owner_elsewhere(entry) is None


def owner_elsewhere(entry: Entry) -> str | None:
    """``host b``, ``cluster b`` or ``user eve``: the only place that knows the job; None: here."""
    if is_of_another_user(entry):
        return f"user {entry.user}"
    if is_cluster_reachable(entry.scheduler, entry.slurm_conf, entry.cluster):
        return None
    return f"{'cluster' if entry.kind.has_nodes else 'host'} {entry.cluster}"


def is_of_another_user(entry: Entry) -> bool:
    """Whether another user submitted the job."""
    return entry.user is not None and entry.user != user_name()


def is_cluster_reachable(scheduler: str, slurm_conf: str | None, cluster: str | None) -> bool:
    """Whether the cluster or host is reachable from here; an unknown name counts as reachable."""
    if cluster is None:
        return True
    names = reachable_clusters(scheduler, slurm_conf)
    return not names or cluster.lower() in {name.lower() for name in names}


def require_reachable(entries: Iterable[Entry]) -> None:
    """Refuse jobs that only another host, cluster or user can say and do anything about.

    Raises RequestError: there is one.
    """
    for entry in entries:
        if (owner := owner_elsewhere(entry)) is not None:
            command = "that user can run the command" if is_of_another_user(entry) else "run the command there"
            raise RequestError(
                f"job {entry.job_id} ({entry.name}) belongs to {owner}, and this is {_here(entry)}",
                hint=f"{command}; `hpcjobs show {shlex.quote(entry.run_dir)}` shows what the job wrote",
            )


def _here(entry: Entry) -> str:
    if is_of_another_user(entry):
        return f"user {user_name()}"
    names = ", ".join(sorted(reachable_clusters(entry.scheduler, entry.slurm_conf)))
    return f"{'cluster' if entry.kind.has_nodes else 'host'} {names}"


def is_ours(entry: Entry, record: JobRecord) -> bool:
    """Whether ``record``, which has the entry's id, is about the entry's job.

    A record of another user or form is not. The script decides where the record has it: its path holds the run folder.
    Else name and submit time must fit. A requeue moves the submit time: a later one is accepted when our job's own
    start or end agrees with it.
    """
    if None not in (record.user, entry.user) and record.user != entry.user:
        return False
    further_form = "_" if entry.array is not None else "+" if entry.is_foreign else ""
    if form_of(record.job_id) not in ("", further_form):
        return False
    if not entry.is_foreign and record.command is not None and os.path.basename(record.command) == JOB_SCRIPT:
        # sacct has the sbatch command; the options of a wrapper may contain blanks.
        return f" {fold_stored(record.command)}".endswith(f" {fold_stored(os.path.join(entry.run_dir, JOB_SCRIPT))}")
    submitted = continuation(entry).submitted
    if entry.is_foreign and record.submitted == submitted:
        return True  # it may have changed its name since this very command read it
    if record.name is not None and fold_stored(record.name) != fold_stored(entry.name):
        return False
    if entry.is_foreign:  # a requeue since then has moved the time
        return record.submitted is None or record.submitted >= submitted
    if record.submitted is None or not submitted or abs(record.submitted - submitted) <= CLOCK_TOLERANCE_S:
        return True
    return record.submitted > submitted and _was_requeued(entry, record, record.submitted)


def job_keys(records: Sequence[JobRecord]) -> list[tuple[str, str, int]]:
    """Which job each record is of, whoever submitted it: its id, its form, and how many had both before.

    A plain job, an array and a heterogeneous job of one id are three jobs. The accounting shows the last task of an
    array under the bare id for a moment: it was submitted with the others. An array has another job's id where all
    tasks of that one, of other names, had ended before; tasks may be requeued, and each may change its name.
    """
    submissions = [(parent_id(record.job_id), record.submitted) for record in records]
    forms = {key: form for key, r in zip(submissions, records, strict=True) if (form := form_of(r.job_id))}
    earlier: dict[tuple[str, str], list[tuple[set[str | None], float]]] = {}
    numbers: dict[int, int] = {}
    for n, record in sorted(enumerate(records), key=lambda pair: pair[1].submitted or math.inf):
        jobs = earlier.setdefault((submissions[n][0], forms.get(submissions[n], "")), [])
        ended = math.inf if record.ended is None else record.ended
        if not jobs or (record.name not in jobs[-1][0] and jobs[-1][1] < (record.submitted or 0)):
            jobs.append(({record.name}, ended))
        else:
            jobs[-1] = (jobs[-1][0] | {record.name}, max(jobs[-1][1], ended))
        numbers[n] = len(jobs)
    return [(key[0], forms.get(key, ""), numbers[n]) for n, key in enumerate(submissions)]


def by_job(records: Iterable[JobRecord]) -> list[list[JobRecord]]:
    """The records of each job, by `job_keys`."""
    all_records = list(records)
    jobs: dict[tuple[str, str, int], list[JobRecord]] = {}
    for key, record in zip(job_keys(all_records), all_records, strict=True):
        jobs.setdefault(key, []).append(record)
    return list(jobs.values())


def first_submitted(job: Iterable[JobRecord]) -> float:
    """When the job of these records was submitted: a requeue moves the time of a task. Now, if no record says it."""
    return min((record.submitted for record in job if record.submitted is not None), default=time.time())


def is_queued(entry: Entry, queue: Iterable[JobRecord]) -> bool:
    """Whether the entry's job is in ``queue``: a job with its id may be a stranger's."""
    return is_reachable(entry) and any(
        parent_id(record.job_id) == continuation(entry).job_id and is_ours(entry, record) for record in queue
    )


def _was_requeued(entry: Entry, record: JobRecord, submitted: float) -> bool:
    """The job started within the record's time, or ended as the record was submitted."""
    state = read_state(entry, task_ids(record.job_id)[0])
    if state is None:
        return False
    if state.ended is not None and abs(submitted - state.ended) <= CLOCK_TOLERANCE_S:
        return True
    if state.started is None or record.started is None:
        return False
    until = float("inf") if record.ended is None else record.ended + CLOCK_TOLERANCE_S
    return record.started - CLOCK_TOLERANCE_S <= state.started <= until


# Ends after which Slurm itself may put a job back: final once the queue has forgotten it.
_PUT_BACK = (
    *(State.PREEMPTED, State.NODE_FAIL, State.BOOT_FAIL, State.LAUNCH_FAILED, State.RECONFIG_FAIL),
    State.REQUEUED,
)
NOT_ACCOUNTED = "it has left the queue, and the accounting does not answer"
_LOST = "its scheduler no longer knows it, and it wrote no end"
_NO_SECOND_ANSWER = "squeue lacked it and does not answer now, and the accounting has it as alive"
RUNAWAY = "the accounting has it as alive, squeue lacks it, and it wrote no end"
_CANCELLED = "it was cancelled, and wrote no end"
_CANCELLED_WAITING = "cancelled while it waited"
Connect = Callable[[str, "str | None"], Scheduler]
ConnectQueue = Callable[[str, "str | None"], JobQueue]
"""As `Connect`; no job is changed."""


class Known(NamedTuple):
    """An entry and its records: one, or one per array task."""

    entry: Entry
    records: list[JobRecord]

    def ids(self, states: Collection[State] = ()) -> list[str]:
        """The scheduler's ids for a command about the job; with ``states``, of its tasks in one of these alone."""
        job_id = current_id(self.entry) if self.entry.task is None else own_ids(self.entry)[0]
        if not states:
            return [job_id]
        chosen = [record for record in self.records if record.state in states]
        if self.entry.array is None or self.entry.task is not None:
            return [job_id] if chosen else []
        return [record.job_id.partition("%")[0] + ("]" if "%" in record.job_id else "") for record in chosen]


class _Open(NamedTuple):
    """An entry that the scheduler is asked about, with the records that were kept of an earlier end."""

    entry: Entry
    accounted: list[JobRecord] | None
    """Of every task."""
    ends: list[JobRecord]
    """Of those tasks that have not started again."""


def statuses(
    entries: Iterable[Entry], *, connect: ConnectQueue = connect, errors: list[SchedulerError] | None = None
) -> list[Known]:
    """The status of each of ``entries``, in their order.

    With ``errors``, a scheduler that does not answer is noted there, and its jobs are reported as they last wrote.

    Raises SchedulerError: a scheduler does not answer, and ``errors`` is not given.
    """
    all_entries = list(entries)
    known: dict[int, list[JobRecord]] = {}
    to_ask: list[_Open] = []
    for entry in all_entries:
        ends = _kept_ends(entry)
        accounted = ends if covers_tasks(entry, ends) and not any(map(_is_provisional, ends)) else None
        if accounted is not None:
            known[id(entry)] = accounted
            if not may_be_requeued(entry, accounted):
                continue
        if (owner := owner_elsewhere(entry)) is None:
            to_ask.append(_Open(entry, accounted, ends))
        elif accounted is None:
            known[id(entry)] = _written(entry, reason=f"{'of' if is_of_another_user(entry) else 'on'} {owner}")
    to_ask.sort(key=lambda member: where_asked(member.entry))
    for (kind, conf), group in groupby(to_ask, key=lambda member: where_asked(member.entry)):
        members = list(group)
        try:
            answers, error = _ask(members, connect(kind, conf or None))
        except SchedulerError as no_answer:
            error = no_answer if errors is not None or any(member.accounted is None for member in members) else None
            answers = [_written(member.entry) for member in members]
        if error is not None:
            if errors is None:
                raise error
            errors.append(error)
        known |= {id(member.entry): records for member, records in zip(members, answers, strict=True)}
    return [Known(entry, known[id(entry)]) for entry in all_entries]


def _is_provisional(record: JobRecord) -> bool:
    """An end that `cancel` kept, and that the accounting may tell better: it hears of jobs some time later."""
    return record.source == "nobody" and record.ended is not None and time.time() - record.ended < FINAL_AFTER_S


def where_asked(entry: Entry) -> tuple[str, str]:
    """The kind and slurm.conf of the entry's scheduler: entries of the same are asked about together."""
    return entry.scheduler, entry.slurm_conf or ""


def _kept_ends(entry: Entry) -> list[JobRecord]:
    return _of(entry, {current_id(entry): read_ends(entry)})


def kept_or_written(entry: Entry, *, reason: str | None = None) -> list[JobRecord]:
    """The ends that were kept, and for the other tasks what they wrote themselves, with ``reason``."""
    ends = _kept_ends(entry)
    there = {task for record in ends for task in tasks_of(record)}
    if entry.job_id in there:
        return ends
    return [*ends, *(replace(one, reason=reason) for one in own_records(entry) if one.job_id not in there)]


def _written(entry: Entry, *, reason: str | None = None) -> list[JobRecord]:
    """What the run folder says, where the scheduler cannot be reached."""
    return kept_or_written(entry, reason=reason) or [replace(_unknown(entry), reason=reason)]


def _ask(members: list[_Open], scheduler: JobQueue) -> tuple[list[list[JobRecord]], SchedulerError | None]:
    """Query the queue once, and the accounting once for jobs that have left it; the queue again where they differ.

    Where the accounting does not answer, the second part of the result is its error, and the jobs that have left the
    queue are reported by their run folders, since their absence from the accounting is not known. So it is where the
    queue does not answer again, for the jobs in doubt.

    Raises SchedulerError: the queue does not answer the first time.
    """
    # The queue first: a job that ends between the two queries is found by one of them.
    queue = scheduler.queue()
    _adopt_continuations((member.entry for member in members), queue)
    by_parent = _by_parent(queue)
    queued = [_ours(member.entry, by_parent) for member in members]
    ended_ids = [
        current_id(member.entry)
        for member, records in zip(members, queued, strict=True)
        # Tasks and components leave the queue one by one; what was submitted by other means has no files that tell.
        if member.accounted is None
        and (
            all_ended(member.entry)
            or not records
            or (
                (member.entry.array is not None or "+" in records[0].job_id)
                and (member.entry.is_foreign or all(r.state is State.COMPLETING for r in records))
            )
        )
    ]
    error: SchedulerError | None = None
    untold: list[str | None] = [None] * len(members)  # why it is not known what has become of it
    try:
        accounted = _by_parent(scheduler.account(ended_ids) if ended_ids else [])
    except SchedulerDownError as no_answer:
        accounted, error = {}, no_answer
        untold = [
            NOT_ACCOUNTED if not records and member.accounted is None else None
            for member, records in zip(members, queued, strict=True)
        ]
    # Requeued by hand since squeue answered, or its answer was cut; or sacct has not heard of the end.
    in_doubt = [
        not records and _may_be_alive(member.entry, _ours(member.entry, accounted))
        for member, records in zip(members, queued, strict=True)
    ]
    if any(in_doubt):
        try:
            again = _by_parent(scheduler.queue_again() if isinstance(scheduler, QueueReadOnce) else scheduler.queue())
            queued = [
                _join(member.entry, records, _ours(member.entry, again))
                for member, records in zip(members, queued, strict=True)
            ]
        except SchedulerError as no_answer:
            error, untold = no_answer, [_NO_SECOND_ANSWER if is_in_doubt else None for is_in_doubt in in_doubt]
    ended = {job_id: [r for r in records if r.state.ended] for job_id, records in accounted.items()}
    candidates = [entry for entry, _, _ in members if entry.is_foreign and current_id(entry) in ended_ids]
    if late := [
        current_id(entry)
        for entry in candidates
        if not covers_tasks(entry, _ours(entry, ended)) or any(not r.state.ended for r in _ours(entry, accounted))
    ]:
        for job_id, records in _by_parent(r for r in scheduler.show_jobs(late) if r.state.ended).items():
            there = {record.job_id for record in ended.get(job_id, [])}
            accounted[job_id] = ended.get(job_id, []) + [r for r in records if r.job_id not in there]
    return [
        _resolve(member, records, [_correct(member.entry, r) for r in _ours(member.entry, accounted)])
        if reason is None
        else _written(member.entry, reason=reason)
        for member, records, reason in zip(members, queued, untold, strict=True)
    ], error


def _join(entry: Entry, records: list[JobRecord], later: list[JobRecord]) -> list[JobRecord]:
    """The entry's records in the queue, and those of tasks that only a later answer has."""
    if not records:
        return later
    lacked = set(own_ids(entry)).difference(*map(tasks_of, records))
    return [*records, *(replace(r, job_id=task) for r in later for task in task_ids(r.job_id) if task in lacked)]


def _may_be_alive(entry: Entry, accounted: Iterable[JobRecord]) -> bool:
    """Whether a job that squeue lacks may be alive by sacct, which has an ended one as running for a while."""
    states = {record.state for record in accounted if not record.state.ended}
    return State.PENDING in states or (bool(states) and not all_ended(entry))


def is_in_queue(entry: Entry, *, connect: ConnectQueue = connect) -> bool:
    """Whether the job waits, runs or is COMPLETING there. Raises SchedulerError: the scheduler does not answer."""
    records = _ours(entry, _by_parent(connect(entry.scheduler, entry.slurm_conf).queue()))
    return any(not record.state.ended for record in records)


def _adopt_continuations(entries: Iterable[Entry], queue: Sequence[JobRecord]) -> None:
    """Record the queued job that continues an entry, if the process that resubmitted was killed before it did."""
    by_script: dict[str | None, list[JobRecord]] = {}
    waiting = {record.job_id for record in queue if record.state is State.PENDING}
    for record in queue:
        if record.command is not None and record.job_id.isdigit():
            by_script.setdefault(record.command, []).append(record)
    for entry in entries:
        others = [r for r in by_script.get(os.path.join(entry.run_dir, JOB_SCRIPT), []) if r.job_id != entry.job_id]
        current = current_id(entry) if others else entry.job_id
        later = [record for record in others if int(record.job_id) > int(current)]
        if later and current not in waiting and _was_left(entry, current):
            first = min(later, key=lambda record: int(record.job_id))
            write_continuation(entry, Continuation(first.job_id, first.submitted or time.time()))


def _was_left(entry: Entry, job_id: str) -> bool:
    """Whether the last attempt is one of ``job_id``, and has ended: its line is written before a job that continues it.

    After the start of another attempt, a later job of the script is a copy, whose request came late.
    """
    attempts, state = read_attempts(Path(entry.run_dir)), read_state(entry, job_id)
    if not attempts or attempts[-1].job_id != job_id:
        return False
    return state is None or state.started is None or state.started <= attempts[-1].started


def _by_parent(records: Iterable[JobRecord]) -> dict[str, list[JobRecord]]:
    by_parent: dict[str, list[JobRecord]] = {}
    for record in records:
        by_parent.setdefault(parent_id(record.job_id), []).append(record)
    return by_parent


def _ours(entry: Entry, by_parent: dict[str, list[JobRecord]]) -> list[JobRecord]:
    """The entry's records, without other jobs of the same id."""
    return [record for record in _of(entry, by_parent) if is_ours(entry, record)]


def _of(entry: Entry, by_parent: dict[str, list[JobRecord]]) -> list[JobRecord]:
    """Select records by the entry's id: of the complete job, or of one array task.

    A component of a heterogeneous job is an entry only where a user has named it. A job that another job continues
    keeps its id. The accounting shows the last task of an array under the array's bare id for a moment. Only an array
    that was cancelled before it began keeps the bare id.
    """
    records = by_parent.get(parent_id(current := current_id(entry)), [])
    if "+" in current:
        return [record for record in records if record.job_id == current]
    if entry.array is not None:
        records = [r for r in records if r.job_id != entry.job_id or r.state is State.CANCELLED]
    if current != entry.job_id:
        return [msgspec.structs.replace(record, job_id=entry.job_id) for record in records]
    if entry.task is None:
        return records
    (only,) = own_ids(entry)
    return [record for record in records if only in (*task_ids(record.job_id), f"{record.job_id}_{entry.task}")]


def _correct(entry: Entry, record: JobRecord) -> JobRecord:
    """Correct the accounting by the job's own state file, where the accounting is late or wrong.

    The accounting may list only the first node of a job that has just ended. It shows TIMEOUT for a job that completed
    or failed while slurmctld was down, if slurmctld came back after the job's limit.
    """
    own = own_record(entry, record.job_id)
    if own is None or own.started is None or record.started is None:
        return record
    # It completed in a later start than that which Slurm put back.
    has_completed = own.state is State.COMPLETED and bool(own.restarts) and record.state in _PUT_BACK
    is_later = has_completed and record.ended is not None and own.started >= record.ended
    if own.state.ended and (is_later or own.started > record.started + CLOCK_TOLERANCE_S):
        return own  # the accounting lacks the last start
    # Records of two different starts: they cannot correct each other.
    if abs(own.started - record.started) > CLOCK_TOLERANCE_S:
        return record
    if own.exit_code is not None and own.exit_code >= 128 and record.exit_code == own.exit_code - 128:
        record = msgspec.structs.replace(record, exit_code=own.exit_code)  # sacct prints codes above 127 without 128
    # Shortly after the end, the accounting may list the first node alone.
    hosts = set(read_hosts(own.node_list))
    if set(read_hosts(record.node_list)) < hosts:
        record = msgspec.structs.replace(record, node_list=own.node_list, nnodes=len(hosts))
    if record.state is not State.TIMEOUT or own.state not in (State.COMPLETED, State.FAILED):
        return record
    if own.ended is None or record.ended is None or own.ended + CLOCK_TOLERANCE_S > record.ended:
        return record
    if record.started is not None and own.ended < record.started:
        return record  # the end of an earlier start
    reason = "Slurm has TIMEOUT: it did not hear of the end"
    return msgspec.structs.replace(own, source=record.source, partition=record.partition, reason=reason)


def _resolve(member: _Open, queued: list[JobRecord], accounted: list[JobRecord]) -> list[JobRecord]:
    """Choose the record of each task.

    The queue counts while the task is alive there, also if the task wrote the end of an earlier attempt; then the
    accounting; then the task's own state file.
    """
    entry = member.entry
    accounted = [_choose_later(record, member.ends) for record in accounted]
    # COMPLETING with such an end on record is a job on its way back to the queue; otherwise it is the job's own end.
    put_back = any(record.state in _PUT_BACK for record in accounted)
    alive = [r for r in queued if not r.state.ended and (put_back or r.state is not State.COMPLETING)]
    if member.accounted is not None and not alive:
        ends = _kept_ends(entry)  # it may have started again, and ended, while the queue answered
        if covers_tasks(entry, ends):
            return ends
        member = member._replace(ends=ends)
    if not alive and all(record.state.ended for record in accounted) and covers_tasks(entry, accounted):
        # sacct may correct a record for some minutes: an early one is shown, but not kept.
        if are_final(entry, accounted):
            keep_ends(entry, accounted)
        return accounted
    # Tasks that are in the queue again were requeued by hand: their kept ends are not the last ones.
    ends = drop_ends(entry, member.ends, alive) if alive and member.ends else member.ends
    there = {task for record in accounted if record.state.ended for task in tasks_of(record)}
    accounted = [*accounted, *(record for record in ends if there.isdisjoint(task_ids(record.job_id)))]
    reported = {task for record in alive for task in tasks_of(record)}
    final = [record for record in accounted if record.state.ended and reported.isdisjoint(task_ids(record.job_id))]
    # slurmctld soon forgets these, and what the tasks wrote may be the end of an earlier start.
    soon_forgotten = [record for record in final if record.source == "scontrol" and record not in member.ends]
    keep_ends(entry, [record for record in soon_forgotten if are_final(entry, [record])])
    reported |= {task for record in final for task in tasks_of(record)}
    rest = [task for task in own_ids(entry) if task not in reported]
    in_queue = {task: record for record in queued for task in tasks_of(record)}
    own: dict[str, JobRecord | None] = dict.fromkeys(rest)
    own |= {task: _own_or_lost(entry, task, in_queue.get(task)) for task in find_started(entry, rest)}
    known = [*alive, *final, *(record for record in own.values() if record is not None)]
    runaway = {task for record in accounted if not record.state.ended for task in tasks_of(record)}
    if not known:
        return [*queued] or [replace(_unknown(entry), reason=RUNAWAY if runaway else None)]
    if alive:  # a task that was taken out of the queue has no record; once the others have ended, its end is reported
        return known
    never_started = (task for task, record in own.items() if record is None and task not in in_queue)
    known += [replace(_unknown(entry), job_id=task, reason=_LOST) for task in never_started]
    return [
        replace(one, reason=RUNAWAY) if one.state is State.UNKNOWN and one.job_id in runaway else one for one in known
    ]


def _choose_later(record: JobRecord, ends: Iterable[JobRecord]) -> JobRecord:
    """The kept end of the same task, where the accounting has only that of an earlier start."""
    for end in ends:
        if end.job_id == record.job_id and None not in (end.ended, record.ended):
            is_later = (end.ended or 0) > (record.ended or 0) + CLOCK_TOLERANCE_S
            return end if is_later or was_requeued_since(record, end) else record
    return record


def was_requeued_since(record: JobRecord, later: JobRecord) -> bool:
    """Whether the accounting's ``record`` is of a start before that of ``later``, all times by slurmctld's clock.

    A requeue moves the submit time: to the second of the end, where Slurm puts the job back.
    """
    if record.source != "sacct" or record.submitted is None or record.ended is None or later.submitted is None:
        return False
    return record.submitted < later.submitted and record.ended <= later.submitted


def _own_or_lost(entry: Entry, task: str, queued: JobRecord | None) -> JobRecord | None:
    """A task that is not alive in the queue, nor accounted for; None when it never started."""
    own = own_record(entry, task)
    if own is None or own.state.ended:
        return own
    lost = replace(own, state=State.UNKNOWN, source="nobody", reason=_LOST)
    # A job that was requeued as it was cancelled has no end in the accounting either.
    cancelled_at = ControlDir(str(task_dir(Path(entry.run_dir), task))).cancelled_at if queued is None else None
    if cancelled_at is not None:
        lost = end_cancelled(lost, cancelled_at)
    return queued or lost


def end_cancelled(record: JobRecord, ended: float) -> JobRecord:
    """The end of a job of which ``hpcjobs cancel`` alone knows."""
    reason = _CANCELLED_WAITING if record.state is State.PENDING else _CANCELLED
    return replace(record, state=State.CANCELLED, source="nobody", ended=ended, reason=reason)


def _unknown(entry: Entry) -> JobRecord:
    return JobRecord(job_id=entry.job_id, state=State.UNKNOWN, source="nobody", name=entry.name)


def keep_accounts(slurm_conf: str, *, connect: Connect = connect) -> None:
    """Ask the cluster before its removal about my jobs without a recorded end; one query of each kind.

    Raises SchedulerError: it does not answer.
    """
    for entry, records in statuses(_open(slurm_conf), connect=connect):
        if all(record.state.ended for record in records):  # the cluster is removed now: later corrections cannot come
            keep_accounting(entry, records)


def end_all(slurm_conf: str) -> None:
    """Close my jobs of a removed cluster: they ended as was kept, or as they themselves wrote, or with the cluster."""
    for entry in _open(slurm_conf):
        records = kept_or_written(entry)
        written = {task: record for record in records for task in task_ids(record.job_id)}
        keep_accounting(entry, [_end(entry, task, written.get(task)) for task in own_ids(entry)])


def _end(entry: index.Entry, task: str, written: JobRecord | None) -> JobRecord:
    if written is not None and written.state.ended:
        return written
    begun = written or JobRecord(
        job_id=task, state=State.PENDING, source="", name=entry.name, submitted=entry.submitted
    )
    return replace(begun, state=State.CANCELLED, source="sandbox", reason="its cluster was taken down")


def _open(slurm_conf: str) -> list[index.Entry]:
    return [entry for entry in index.entries() if entry.slurm_conf == slurm_conf and not is_closed(entry)]
