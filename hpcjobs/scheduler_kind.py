"""Names and capabilities of the kinds of schedulers.

Code that depends on it asks for a capability: a further scheduler is a line of `KINDS`, and no search for comparisons.
Python 3.6, standard library: the node's program has this module too.
"""

from typing import NamedTuple, Optional


class SchedulerKind(NamedTuple):
    """Capabilities of a scheduler."""

    has_partitions: bool
    """Jobs run in a partition of a cluster, with the partition's limits."""
    has_nodes: bool
    """Jobs get nodes of a cluster; otherwise they run on this machine."""
    has_accounting: bool
    """It keeps records of ended jobs, other users' too (sacct)."""
    runs_steps: bool
    """It starts tasks within an allocation, from outside too (srun)."""
    takes_sbatch_options: bool
    """Scripts and the user's environment have options of sbatch, and others submit jobs with it too."""
    may_requeue: bool
    """It puts a job back into its queue, also one that has ended."""
    tells_end: bool
    """Its queue knows when a running job reaches its time limit."""
    has_raw_task_ids: bool
    """A task of an array has an id of its own, beside the array's id with its number."""
    id_variable: Optional[str]
    """The variable that it sets to a job's id; None: a supervisor starts the script, and sets HPCJOBS_JOB_ID and
    HPCJOBS_AGAIN, by which the script asks for another start."""
    id_prefix: str
    """Letters before the number in a job's id."""


KINDS = {
    "slurm": SchedulerKind(
        has_partitions=True,
        has_nodes=True,
        has_accounting=True,
        runs_steps=True,
        takes_sbatch_options=True,
        may_requeue=True,
        tells_end=True,
        has_raw_task_ids=True,
        id_variable="SLURM_JOB_ID",
        id_prefix="",
    ),
    "local": SchedulerKind(
        has_partitions=False,
        has_nodes=False,
        has_accounting=False,
        runs_steps=False,
        takes_sbatch_options=False,
        may_requeue=False,
        tells_end=False,
        has_raw_task_ids=False,
        id_variable=None,
        id_prefix="L",
    ),
}
CLUSTER = "slurm"
"""The kind of a cluster of which no site is known."""


def find_kind(scheduler: str) -> SchedulerKind:
    """The kind of that name. One of a newer hpcjobs, which an index can name, is a cluster's."""
    return KINDS.get(scheduler, KINDS[CLUSTER])
