"""Records what became of a cluster's jobs when the cluster is removed for good, as a sandbox is."""

from __future__ import annotations

from msgspec.structs import replace

from hpcjobs.run import index
from hpcjobs.run.accounting_file import is_closed, keep_accounting
from hpcjobs.run.state_file import own_ids, own_records
from hpcjobs.run.status import Connect, statuses
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.connect import connect


def keep_accounts(slurm_conf: str, *, connect: Connect = connect) -> None:
    """Ask the cluster, while it is there, about my jobs whose end is not yet recorded; one query of each kind.

    Raises:
        SchedulerError: it does not answer.
    """
    for entry, records in statuses(_open(slurm_conf), connect=connect):
        if all(record.state.ended for record in records):  # there is no time left for them to settle
            keep_accounting(entry, records)


def end_all(slurm_conf: str) -> None:
    """Close my jobs of a removed cluster: they have ended as they themselves wrote, or with the cluster."""
    for entry in _open(slurm_conf):
        written = {record.job_id: record for record in own_records(entry)}
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
