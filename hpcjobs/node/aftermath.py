"""The end of a job whose deciding process was killed: rank 0's wrapper, which Slurm gives some seconds, decides.

Slurm ends a job when its batch script ends, however that happened: the ranks get SIGTERM, save, and leave.
"""

import os
import time

from hpcjobs.node import decide
from hpcjobs.node.conclude import CurrentAttempt
from hpcjobs.node.options import parse
from hpcjobs.node.slurm import report
from hpcjobs.node.supervisor import KILLED_CODE, connect
from hpcjobs.processes.tree import is_alive
from hpcjobs.record.control import ControlDir


def conclude_killed(control_dir: str) -> int:
    """Decide about the attempt that ``control_dir`` has running, if its process was killed; exit code 0."""
    running = ControlDir(os.path.dirname(control_dir)).running()
    if running is None or running.pid == 0 or running.host != os.uname().nodename:
        return 0
    if is_alive(running.pid):
        return 0
    options = parse(running.argv)
    scheduler = connect(options, dict(os.environ))
    if scheduler.read_cause() == decide.REQUEUED:
        return 0
    report(f"the process that decides about this job, {running.pid}, was killed: rank 0 decides")
    job = CurrentAttempt(
        options, scheduler, job_id=os.environ.get("SLURM_JOB_ID", ""), nodes=running.nodes, started=running.started
    )
    recorded = job.find_recorded(running)
    if recorded is not None:
        job.carry_out(recorded, int(time.time()))
        return 0
    job.conclude(decide.AttemptEnd(KILLED_CODE, scheduler_cause=decide.NODE), int(time.time()))
    return 0
