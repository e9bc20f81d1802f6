"""The scheduler as a user sees it, and jobs that can be held back and watched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpcjobs.job.models import Plan
from hpcjobs.job.plan import plan
from hpcjobs.packing import pack
from hpcjobs.processes import tree
from hpcjobs.run.folder import write_shell_files
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.local.client import LocalScheduler, state_folder

T = TypeVar("T")


def until(question: Callable[[], T | None], *, within_s: float = 90) -> T:
    """The first answer that is true."""
    end = time.monotonic() + within_s
    while not (answer := question()):
        assert time.monotonic() < end, f"still {answer!r} after {within_s} s"
        time.sleep(0.01)
    return answer


def make_plan(*program: str, **options: Any) -> Plan:
    """A plan whose run folder is there."""
    made = plan(program, **({"site": "local"} | options))
    (made.run_dir / "logs").mkdir(mode=0o700, parents=True)
    if made.job.retries is not None:
        (made.run_dir / "node.pyz").write_bytes(pack("hpcjobs.node"))
    write_shell_files(made.run_dir, made.script)
    (made.run_dir / "job.sh").write_text(made.script)
    (made.run_dir / "job.sh").chmod(0o700)
    return made


class Machine:
    """The scheduler under test, and what a user can see of it."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.local = LocalScheduler()
        self.plans: dict[str, Plan] = {}

    def submit(self, *program: str, **options: Any) -> str:
        made = make_plan(*program, **options)
        job_id = self.local.submit(made).job_id
        self.plans[job_id] = made
        return job_id

    def held(self, name: str, *, then: str = "exit 0", **options: Any) -> str:
        """A job that says it runs by a file NAME.runs, and goes on when somebody writes to NAME.go."""
        os.mkfifo(self.here / f"{name}.go")
        say = f'echo "$HPCJOBS_JOB_ID ${{CUDA_VISIBLE_DEVICES-unset}}" > {name}.part; mv {name}.part {name}.runs'
        script = f"{say}; read -r _ < {name}.go; {then}"
        return self.submit("bash", "-c", script, name=name, **options)

    def let_go(self, name: str) -> None:
        (self.here / f"{name}.go").write_text("go\n")

    def runs(self, name: str) -> bool:
        return (self.here / f"{name}.runs").exists()

    def wait_for(self, name: str) -> None:
        """Until the held job of that name runs."""
        until(lambda: self.runs(name))

    def records(self, job_id: str) -> dict[str, JobRecord]:
        return {record.job_id: record for record in self.local.account([job_id])}

    def record(self, job_id: str) -> JobRecord:
        (records,) = self.local.account([job_id])
        return records

    def state(self, job_id: str) -> State:
        return self.record(job_id).state

    def end_of(self, job_id: str) -> JobRecord:
        return until(lambda: record if (record := self.record(job_id)).state.ended else None)

    def ends_of(self, job_id: str) -> dict[str, JobRecord]:
        def all_ended() -> dict[str, JobRecord] | None:
            records = self.records(job_id)
            return records if all(record.state.ended for record in records.values()) else None

        return until(all_ended)

    def queue(self) -> dict[str, tuple[str, str | None]]:
        return {record.job_id: (record.state.value, record.reason) for record in self.local.queue()}

    def log(self, job_id: str) -> str:
        made = self.plans[job_id.partition("_")[0]]
        return (made.run_dir / "logs" / f"{made.job.name}_{job_id}.out").read_text()

    def keepers(self, job_id: str) -> list[int]:
        """The supervisor of a job first; then, each after its parent, those of an array's tasks, and guards."""
        folder = str(state_folder() / "jobs" / job_id)
        left = {pid: tree.parent(pid) for pid, arguments in commands().items() if folder in arguments}
        records: list[int] = []
        while left:
            nearest = sorted(pid for pid, parent in left.items() if parent not in left)
            records += nearest
            left = {pid: parent for pid, parent in left.items() if pid not in nearest}
        return records


def commands() -> dict[int, list[str]]:
    """Command lines of all living processes."""
    records = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if arguments != [""]:  # a zombie has none
            records[int(folder.name)] = arguments[:-1]
    return records


def alive(pid: int) -> bool:
    return pid in commands()
