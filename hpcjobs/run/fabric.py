"""Plans a check of nodes as a job, and reads its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcjobs.errors import HpcJobsError
from hpcjobs.fabric.verdict import BAD, NodeVerdict, append, record_path
from hpcjobs.job.fault_tolerance import check_words
from hpcjobs.job.models import Plan
from hpcjobs.job.plan import plan
from hpcjobs.record.fabric import FABRIC, FabricReport
from hpcjobs.record.names import STATE
from hpcjobs.run.identity import is_queued
from hpcjobs.run.index import Entry
from hpcjobs.run.status import Connect
from hpcjobs.runtime.dist import first_host
from hpcjobs.scheduler.base import State, connect
from hpcjobs.site.library import default_site, load_site

LIMIT = "10m"
SILENT_S = 30.0
_LOOK_S, _ASK_S = 0.5, 15.0


def check_plan(
    site: str | None, *, tolerance: float | None = None, quick: bool = False, made_by: str, **resources: Any
) -> Plan:
    """The job that checks ``nodes`` of ``site``; ``resources`` as of `plan`."""
    where = load_site(site or default_site())
    cpus = resources.get("cpus_per_task", where.defaults.cpus_per_task)
    arguments = ["hpcjobs.fabric.check", *check_words(where, cpus_per_task=cpus)]
    arguments += ["--quick"] if quick else []
    arguments += ["--tolerance", str(tolerance)] if tolerance is not None else []
    # Nodes that are left out elsewhere are checked here: this is how a repaired node is recognised.
    options: dict[str, Any] = {"time": LIMIT, "ntasks_per_node": 1, "exclude": None, **resources}
    return plan(arguments, site=where, name="fabric", template="fabric", container="none", made_by=made_by, **options)


def silent_first_node(
    entry: Entry,
    *,
    connect: Connect = connect,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait until the job's script starts (None), or its node does not respond: that node.

    The job's first node checks all other nodes. If the first node is cut off and never gets the script, Slurm shows
    the job as running, and starts it again and again.
    """
    scheduler = connect(entry.scheduler, entry.slurm_conf)
    begun = Path(entry.run_dir) / STATE
    node, since, last_query = None, 0.0, -_ASK_S
    while not begun.exists():
        now = clock()
        if now - last_query >= _ASK_S:
            last_query = now
            record = next((each for each in scheduler.queue() if is_queued(entry, [each])), None)
            if record is None:
                return None
            if node is None and record.state is not State.PENDING and record.node_list:
                node, since = first_host(record.node_list), now
        if node is not None and now - since >= SILENT_S:
            return node
        pause(_LOOK_S)
    return None


def give_up(entry: Entry, node: str) -> None:
    """Cancel the check, and remember why."""
    connect(entry.scheduler, entry.slurm_conf).cancel([entry.job_id])
    reason = f"did not start the job's script within {SILENT_S:g} s"
    verdict = NodeVerdict(node, BAD, time.time(), reason, entry.job_id)
    append(record_path(entry.site), [verdict])


def read_report(run_dir: Path) -> FabricReport:
    """Read the report of the check in this run folder.

    Raises:
        HpcJobsError: it did not come to its end.
    """
    path = run_dir / FABRIC
    try:
        return FabricReport.read(run_dir)
    except FileNotFoundError as error:
        raise HpcJobsError(f"the check wrote no {path}", hint=f"its log is in {run_dir / 'logs'}") from error
    except ValueError as error:
        raise HpcJobsError(f"{path}: {error}") from error
