"""Decides which jobs are ours: which scheduler knows an entry, and which records are about it.

A job id alone says little. Two clusters or two hosts with one home give out the same ids, and a controller that lost
its state begins again at 1. So a job is its scheduler, cluster or host, id, submit time, user and run folder; a record
that does not fit belongs to another job: it is never shown, used, or cancelled.
"""

from __future__ import annotations

import os
import pwd
import shlex
from collections.abc import Iterable

from hpcjobs.errors import RequestError
from hpcjobs.job.array import task_ids
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import CLOCK_TOLERANCE_S, continuation, read_state
from hpcjobs.scheduler.base import JobRecord, reachable_clusters
from hpcjobs.slurm_commands import fold_stored

SCRIPT = "job.sh"


def user_name() -> str:
    """The user's name, or the number where the system has no name for it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def own_cluster(scheduler: str, slurm_conf: str | None) -> str | None:
    """The cluster or host that a job submitted now belongs to; None: not one name, or none that can be learnt."""
    names = reachable_clusters(scheduler, slurm_conf)
    return next(iter(names)) if len(names) == 1 else None


def is_reachable(entry: Entry) -> bool:
    """Whether this user reaches the job's scheduler from here."""
    return owner_elsewhere(entry) is None


def owner_elsewhere(entry: Entry) -> str | None:
    """``host b``, ``cluster b`` or ``user eve``: the only place that knows the job; None: here."""
    if entry.user is not None and entry.user != user_name():
        return f"user {entry.user}"
    if is_cluster_reachable(entry.scheduler, entry.slurm_conf, entry.cluster):
        return None
    return f"{'cluster' if entry.kind.has_nodes else 'host'} {entry.cluster}"


def is_cluster_reachable(scheduler: str, slurm_conf: str | None, cluster: str | None) -> bool:
    """Whether the cluster or host is reachable from here; an unknown name counts as reachable."""
    if cluster is None:
        return True
    names = reachable_clusters(scheduler, slurm_conf)
    return not names or cluster.lower() in {name.lower() for name in names}


def require_reachable(entries: Iterable[Entry]) -> None:
    """Refuse jobs that only another host, cluster or user can say and do anything about.

    Raises:
        RequestError: there is one.
    """
    for entry in entries:
        if (owner := owner_elsewhere(entry)) is not None:
            raise RequestError(
                f"job {entry.job_id} ({entry.name}) belongs to {owner}, and this is {_here(entry)}",
                hint=f"run the command there; `hpcjobs show {shlex.quote(entry.run_dir)}` shows what the job wrote",
            )


def _here(entry: Entry) -> str:
    if entry.user is not None and entry.user != user_name():
        return f"user {user_name()}"
    names = ", ".join(sorted(reachable_clusters(entry.scheduler, entry.slurm_conf)))
    return f"{'cluster' if entry.kind.has_nodes else 'host'} {names}"


def is_ours(entry: Entry, record: JobRecord) -> bool:
    """Whether ``record``, which has the entry's id, is about the entry's job.

    A record of another user is not. The script decides where the record has it: its path holds the run folder. Else
    name and submit time must fit. A requeue moves the submit time: a later one is accepted when our job's own start or
    end agrees with it.
    """
    if None not in (record.user, entry.user) and record.user != entry.user:
        return False
    if not entry.is_foreign and record.command is not None and os.path.basename(record.command) == SCRIPT:
        # sacct has the sbatch command; the options of a wrapper may contain blanks.
        return f" {fold_stored(record.command)}".endswith(f" {fold_stored(os.path.join(entry.run_dir, SCRIPT))}")
    if record.name is not None and fold_stored(record.name) != fold_stored(entry.name):
        return False
    submitted = continuation(entry).submitted
    if entry.is_foreign:  # read from the scheduler by this very command; a requeue since then has moved the time
        return record.submitted is None or record.submitted >= submitted
    if record.submitted is None or not submitted or abs(record.submitted - submitted) <= CLOCK_TOLERANCE_S:
        return True
    return record.submitted > submitted and _was_requeued(entry, record, record.submitted)


def is_queued(entry: Entry, queue: Iterable[JobRecord]) -> bool:
    """Whether the entry's job is in ``queue``: a job with its id may be a stranger's."""
    return is_reachable(entry) and any(
        record.job_id.split("_")[0] == continuation(entry).job_id and is_ours(entry, record) for record in queue
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
