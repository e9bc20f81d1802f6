"""The life of a sweep: it is run, looked at, resumed and cancelled while faults happen; then somebody resumes it.

Each cell runs to completion exactly once, and a sweep that is complete submits nothing more.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import bodies
from life import BUSY_S, Life, Schedule
from slurm import Attempt, Job
from world import Process

from hpcjobs.errors import HpcJobsError
from hpcjobs.job.models import JobSpec
from hpcjobs.record import SUBMITTED
from hpcjobs.scheduler.base import State
from hpcjobs.site.models import Partition, Site
from hpcjobs.site.resources import Resources
from hpcjobs.sweeps import submit
from hpcjobs.sweeps.cell_status import cell_statuses
from hpcjobs.sweeps.folder import NOBODY, Definition, SweepFolder
from hpcjobs.sweeps.spec import define

RESUMES = 5
"""So often a sweep is resumed once the world is quiet: a cell may fail twice by itself."""

CANCEL_S = 60.0
"""A cell that ran has ended so long after its sweep was cancelled: Slurm kills it after half a minute."""


@dataclass
class CellRun:
    """One start of a cell's program."""

    cell: str
    attempt: Attempt
    process: Process
    began: float
    ended: float | None = None
    is_completed: bool = False
    exit_code: int | None = None

    @property
    def goes_on(self) -> bool:
        return self.ended is None and self.process.alive and not self.attempt.is_ghost


class Truth(NamedTuple):
    """What `hpcjobs sweep status` must show of a cell, and of which start of which task."""

    state: State
    task: str
    starts: int


def _chunk_of(run: CellRun) -> int:
    return int(Path(run.attempt.job.script).parent.name)


def _site() -> Site:
    import msgspec

    partitions: dict[str, Partition | dict[str, Any]] = {"compute": {"nodes": 4, "node": {"cpus": 16}}}
    return msgspec.convert({"name": "sim", "partitions": partitions, "run_root": "/place-of-the-sweep"}, Site)


class SweepLife(Life):
    """A sweep in a world with faults, and what became of its cells."""

    def __init__(self, schedule: Schedule, home: Path) -> None:
        super().__init__(schedule, home)
        self.folder = SweepFolder(home / "sweep")
        self.runs: list[CellRun] = []
        self.completed: dict[str, list[float]] = {}
        self.shown: dict[str, float] = {}
        """When a cell was first shown as completed."""
        self.failures: dict[str, int] = {}
        """How often each cell fails before it completes."""
        self.needless = 0
        """How often something was submitted although all cells were complete: once more where that was not recorded."""
        self.submissions: list[tuple[float, Process]] = []
        """When each command that submits began."""
        self.cancelled: list[float] = []
        """When each command had cancelled the sweep while no other submitted."""
        self.definition: Definition

    def body(self) -> Any:
        return lambda job: self._next if Path(job.script).parent.name.startswith("next-") else self._task

    # --- what jobs do

    def _task(self, attempt: Attempt) -> int:
        """An array's task, as job.sh and sweep.bash."""
        world, job = self.world, attempt.job
        chunk = os.path.dirname(job.script)
        folder, started = f"{chunk}/{job.task}", int(world.now)
        bodies.write_state(world, attempt, folder, "RUNNING", None, started)
        code = self._run_cells(attempt, chunk)
        state = "CANCELLED" if code == 143 else "FAILED" if code else "COMPLETED"
        bodies.write_state(world, attempt, folder, state, code, started)
        return code

    def _run_cells(self, attempt: Attempt, chunk: str) -> int:
        job = attempt.job
        with suppress(OSError):
            os.symlink(str(job.root), f"{chunk}/owner")
        try:
            owner = os.readlink(f"{chunk}/owner")
            content = json.loads(Path(chunk, "chunk.json").read_text())
        except OSError:
            return 1
        if owner != str(job.root):
            return 0
        code, pack, task = 0, content["pack"], job.task or 0
        for cell in content["cells"][task * pack : (task + 1) * pack]:
            one = self._run_cell(attempt, cell)
            code = one or code
            if one == 143:
                break
        return code

    def _run_cell(self, attempt: Attempt, cell: str) -> int:
        world = self.world
        folder = f"{self.folder.path}/cells/{cell}"
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError:
            return 1
        started = int(world.now)

        def write(state: str, code: int | None) -> None:
            bodies.write_state(world, attempt, folder, state, code, started, job_id=attempt.job.id)

        if os.path.exists(f"{folder}/.completed"):
            state = Path(folder, "state.json")
            if not state.exists() or '"COMPLETED"' not in state.read_text():
                write("COMPLETED", 0)
            return 0
        if attempt.number and self._was_submitted_again(attempt, cell):
            return 0
        write("RUNNING", None)
        assert world.current is not None
        run = CellRun(cell, attempt, world.current, world.now)
        self._check_parallel(run)
        self.runs.append(run)
        end = world.now + self.duration_s
        while world.now < end:
            if bodies.TERM in world.wait_signals(end - world.now):
                run.ended, run.exit_code = world.now, 143
                write("CANCELLED", 143)
                return 143
        run.ended = world.now
        if self.failures.get(cell, 0) > 0:
            self.failures[cell] -= 1
            run.exit_code = 3
            write("FAILED", 3)
            return 3
        run.is_completed = True
        self.completed.setdefault(cell, []).append(world.now)
        write("COMPLETED", 0)
        with suppress(OSError), open(f"{folder}/.completed", "w"):
            pass
        return 0

    def _was_submitted_again(self, attempt: Attempt, cell: str) -> bool:
        """As ``_hj_was_submitted_again`` of templates/shell/sweep.bash."""
        own = int(os.path.basename(os.path.dirname(attempt.job.script)))
        return any(
            cell in chunk.cells and chunk.number > own and self.folder.owner(chunk) != NOBODY
            for chunk in self.folder.chunks()
        )

    def _next(self, attempt: Attempt) -> int:
        """The job that submits the rest: `hpcjobs sweep continue`."""
        folder, started = os.path.dirname(attempt.job.script), int(self.world.now)
        bodies.write_state(self.world, attempt, folder, "RUNNING", None, started)
        code = 0
        try:
            submit.submit_waiting(self.folder)
        except (HpcJobsError, OSError) as error:
            self.world.log(f"{attempt.job.id}: {error}")
            code = 1
        bodies.write_state(self.world, attempt, folder, "FAILED" if code else "COMPLETED", code, started)
        return code

    # --- what users do

    def begin(self) -> None:
        """`hpcjobs sweep run`."""
        self._submit(lambda: submit.start(self.folder, self.definition))

    def resume(self) -> None:
        self._submit(lambda: submit.resume(self.folder))

    def cancel(self) -> None:
        """`hpcjobs sweep cancel`."""
        process, began = self.world.current, self.world.now
        assert process is not None
        others = {other.pid for _, other in self.submissions if other.alive}
        self.world.log(f"cancelled {submit.cancel(self.folder)}")
        others |= {other.pid for when, other in self.submissions if when >= began}
        if others or process.name in self.world.misled:
            return
        self.cancelled.append(self.world.now)
        left = [
            job.id for job in self.slurm.jobs.values()
            if not job.has_ended and job.cancelled_at is None and Path(job.script).with_name(SUBMITTED).exists()
        ]  # fmt: skip
        if left:
            self.errors.append(f"{self.folder.path} was cancelled, and jobs {left} stay in the queue")

    def _submit(self, deed: Any) -> None:
        assert self.world.current is not None
        self.submissions.append((self.world.now, self.world.current))
        was_complete = all(self.completed.get(cell.id) for cell in self.definition.cells)
        outcome = deed()
        ids = [entry.job_id for entry in outcome.submitted]
        self.world.log(f"submitted {ids}: {outcome.cells} cells, {outcome.done} done, {outcome.open} open")
        self.needless += bool(outcome.submitted) and was_complete
        if outcome.submitted and was_complete and self.needless > (2 if self._could_not_record() else 0):
            self.errors.append(f"{self.folder.path}: every cell is complete, and arrays {ids} were submitted")
        for entry in outcome.submitted:
            self._check_chunk(Path(entry.run_dir) / "chunk.json")

    def _check_chunk(self, path: Path) -> None:
        """An array is made of cells that have not completed."""
        made, cells = path.stat().st_mtime, json.loads(path.read_text())["cells"]
        again = [cell for cell in cells if any(when < made for when in self.completed.get(cell, []))]
        is_disturbed = self.world.misled or any("fault" in line for line in self.world.trace)
        if again and not is_disturbed and not self._could_not_record():
            self.errors.append(f"{self.folder.path}: cells {again} had completed, and were submitted again")

    def _check_parallel(self, run: CellRun) -> None:
        """No more cells of an array run at once than the sweep allows, and none of the array that it follows."""
        most, number = self.definition.max_parallel, _chunk_of(run)
        if most is None or run.attempt.is_ghost:
            return
        arrays = {chunk.number: chunk.after for chunk in self.folder.chunks()}

        others = [one for one in self.runs if one.goes_on and _chunk_of(one) in (number, arrays.get(number))]
        earlier = [one.cell for one in others if _chunk_of(one) != number]
        if earlier or len(others) >= most:
            cells = earlier or [one.cell for one in others]
            self.errors.append(f"{self.folder.path}: cell {run.cell} begins while {cells} run, of {most} at once")

    def _last_task(self, cell: str) -> Job | None:
        """The cell's last task, where that is certain."""
        holding = [chunk for chunk in self.folder.chunks() if cell in chunk.cells]
        if not holding or self.slurm.down["ctl"]:
            return None
        last = holding[-1]
        script, task = str(self.folder.chunk_dir(last.number) / "job.sh"), last.cells.index(cell) // last.pack
        jobs = [job for job in self.slurm.every if job.script == script and job.task == task]
        return jobs[0] if len(jobs) == 1 else None

    def _truth(self, cell: str) -> Truth | None:
        """The state of a cell whose last task is certain."""
        job, runs = self._last_task(cell), [run for run in self.runs if run.cell == cell]
        if job is None:
            return None
        run = runs[-1] if runs and job.attempts and runs[-1].attempt is job.attempts[-1] else None
        if not job.attempts and job.state == "PENDING":
            return Truth(State.PENDING, job.id, 0)
        if run is not None and run.goes_on and run.attempt is job.attempt and run.attempt.cause is None:
            return Truth(State.RUNNING, job.id, len(job.attempts))
        if run is not None and run.exit_code == 3 and job.has_ended:
            return Truth(State.FAILED, job.id, len(job.attempts))
        return None

    def _is_over(self, cell: str) -> bool:
        """Whether the cell began in its last task, and that has ended."""
        job, runs = self._last_task(cell), [run for run in self.runs if run.cell == cell]
        if job is None or not job.has_ended or not runs:
            return False
        return bool(job.attempts) and runs[-1].attempt is job.attempts[-1]

    def status(self) -> None:
        """`hpcjobs sweep status`: what it shows of each cell is so, unless that changes meanwhile."""
        began, process = self.world.now, self.world.current
        assert process is not None
        before = {cell.id: self._truth(cell.id) for cell in self.definition.cells}
        over = {cell.id for cell in self.definition.cells if self._is_over(cell.id)}
        states = cell_statuses(self.folder, submit.connect_to(self.folder.definition))
        for one in states:
            cell = one.cell.id
            truth = before[cell]
            is_certain = truth is not None and truth == self._truth(cell) and process.name not in self.world.misled
            if truth is not None and is_certain and one.state is not truth.state and not self._could_not_record():
                self.errors.append(f"{self.folder.path}: cell {cell} is {truth.state}, and is shown as {one.state}")
            is_alive = one.state in (State.PENDING, State.RUNNING, State.COMPLETING)
            if cell in over and is_alive and process.name not in self.world.misled and self._is_over(cell):
                self.errors.append(f"{self.folder.path}: the task of cell {cell} ended, and it is shown as {one.state}")
            if one.state is State.COMPLETED:
                self.shown.setdefault(cell, self.world.now)
                if not self.completed.get(cell):
                    self.errors.append(f"{self.folder.path}: cell {cell} is shown as COMPLETED, and is not")
            elif self.shown.get(cell, began) < began:
                self.errors.append(f"{self.folder.path}: cell {cell} was COMPLETED, and is shown as {one.state}")

    # --- the schedule

    def prepare(self) -> None:
        draw = self.world.random
        pack = draw.choice((1, 1, 2))
        points = [{"x": number} for number in range(draw.choice((2, 4, 6)))]
        self.duration_s = draw.choice((1.0, 60.0, 600.0))
        request = JobSpec(program=("true",), resources=Resources(time="30m"), name="sweep")
        self.definition = define(
            request, points, site=_site(), pack=pack, max_parallel=draw.choice((None, 2)), made_by="a test"
        )
        if draw.random() < 0.3:
            self.settings.max_submit_jobs = draw.choice((3, 4))
        for cell in self.definition.cells:
            self.failures[cell.id] = draw.choice((0, 0, 0, 0, 1, 2))
        at = draw.uniform(0, 600)
        self.user("submit", self.begin, delay_s=at)
        for verb, most in ((self.begin, 2), (self.resume, 4), (self.status, 4), (self.look, 2)):
            for _ in range(draw.randrange(most)):
                near_end = max(1.0, draw.choice((1, 2)) * self.duration_s - draw.uniform(0, 20))
                often = (draw.uniform(1, 60), draw.uniform(1, 2000), draw.uniform(1, BUSY_S), near_end)
                delay_s = at + draw.choice(often)
                name = verb.__name__ if verb != self.begin else "submit again"
                self.user(name, verb, host=draw.choice(("login1", "login2")), delay_s=delay_s)
        if draw.random() < 0.15:
            delay_s = at + draw.choice((20.0, 300.0, 3000.0)) * draw.random()
            self.user("cancel", self.cancel, delay_s=delay_s)
        self.plan_events()

    def quieten(self) -> None:
        """No fault happens any more, and the sweep is run and resumed until it is complete."""
        self.end_faults()
        for number in range(RESUMES):
            self.user("last resume", self.resume if number else self.begin, delay_s=1.0)
            self.world.run(86400.0)
        self.user("last status", self.status, delay_s=1.0)
        self.world.run(1000.0)

    def check(self) -> None:
        """Each cell was completed exactly once, never by two at a time, and the sweep says so."""
        path = self.folder.path
        for cell in self.definition.cells:
            runs = [run for run in self.runs if run.cell == cell.id and not run.attempt.is_ghost]
            if not self.completed.get(cell.id):
                self.errors.append(f"{path}: cell {cell.id} was never completed, in {len(runs)} runs")
            elif cell.id not in self.shown:
                self.errors.append(f"{path}: cell {cell.id} is complete, and its status is another")
            for first, second in pairwise(runs):
                ended = first.ended if first.ended is not None else first.attempt.ended
                if ended is None or ended > second.began:
                    self.errors.append(f"{path}: cell {cell.id} began at {second.began:.0f} while it ran")
            self._check_cancelled(runs)
            completed = sum(run.is_completed for run in runs)
            if completed > 1 and not self._could_not_record():
                self.errors.append(f"{path}: cell {cell.id} was completed {completed} times")

    def _check_cancelled(self, runs: list[CellRun]) -> None:
        """Once the sweep is cancelled, no task starts a cell, and those that ran end, until somebody resumes it."""
        for when in self.cancelled:
            until = min((began for began, _ in self.submissions if began > when), default=math.inf)
            for run in runs:
                ended = run.ended if run.ended is not None else run.attempt.ended or math.inf
                if when < run.attempt.started < run.began < until:
                    self.errors.append(f"{self.folder.path}: cell {run.cell} began, and the sweep was cancelled")
                elif run.began <= when and ended > when + CANCEL_S:
                    self.errors.append(f"{self.folder.path}: cell {run.cell} ran on, and the sweep was cancelled")

    def _could_not_record(self) -> bool:
        """What a job wrote about its end was lost: it is run again."""
        in_jobs = any("fault" in line and " in job " in line for line in self.world.trace)
        return in_jobs or any(fault.detail in ("full", "power") for fault in self.world.injected)
