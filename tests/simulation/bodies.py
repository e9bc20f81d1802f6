"""What jobs do on their nodes: a script that writes its state as job.sh does, and node.pyz around one that resumes."""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm import Attempt, Job
from world import Process, World

from hpcjobs.node import conclude, step, supervisor

TERM, USR1, CHLD = signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD


@dataclass
class Work:
    """What the program of a job does, and what became of it."""

    run_dir: str
    retries: bool = False
    steps: int = 10
    step_s: float = 30.0
    save_every: int = 2
    code: int = 0
    """Exit code at the end of a plain job; of one with retries, once, at `fails_at`."""
    fails_at: int | None = None
    fails_always: bool = False
    saves: bool = True
    """Else it never saves anything, and goes on when it is told to."""
    on_term: str = "save"
    """``save``: it saves and leaves; ``die``; ``ignore``: until SIGKILL."""
    save_s: float = 3.0
    completed: list[tuple[str, float]] = field(default_factory=list)
    """Each time that the program did its last step: who, and when."""
    runs: list[Run] = field(default_factory=list)
    failed_once: set[str] = field(default_factory=set)


@dataclass
class Run:
    """One start of the program."""

    attempt: Attempt
    began: float
    first_step: int
    ended: float | None = None
    last_step: int = 0
    saved: int = 0
    warned: float | None = None
    """When it was first told to save."""
    code: int | None = None
    process: Process | None = None


def put(world: World, path: str, text: str, *, tries: int = 60) -> bool:
    """As the shell's ``echo >FILE`` in a loop; False: it could not be written within a minute."""
    for _ in range(tries):
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return True
        except OSError:  # noqa: PERF203 - a try in a loop is what it is about
            world.sleep(1.0)
    return False


def write_state(
    world: World, attempt: Attempt, run_dir: str, state: str, code: int | None, started: int, job_id: str | None = None
) -> None:
    """As ``_hj_write_state`` of templates/shell/job.bash; ``job_id``: of a cell of a sweep."""
    env = attempt.environ
    content = {
        "schema": 1, "job_id": job_id or env["SLURM_JOB_ID"], "state": state, "exit_code": code, "started": started,
        "ended": None if state == "RUNNING" else int(world.now), "nodes": env["SLURM_JOB_NODELIST"],
        "restarts": int(env["SLURM_RESTART_COUNT"]), "first_failure": None, "cluster": env["SLURM_CLUSTER_NAME"],
        "array_job_id": env.get("SLURM_ARRAY_JOB_ID"),
    }  # fmt: skip
    try:
        os.makedirs(run_dir, exist_ok=True)
        with open(f"{run_dir}/.state.json", "w", encoding="utf-8") as file:
            file.write(json.dumps(content))
        os.replace(f"{run_dir}/.state.json", f"{run_dir}/state.json")
    except OSError:
        pass  # as `>FILE && mv` of a shell


def is_late_copy(work: Work, attempt: Attempt) -> bool:
    """As ``_hj_leave_late_copy`` of templates/shell/job.bash."""
    if attempt.environ.get("HPCJOBS_REQUEST") != work.run_dir or attempt.number:
        return False
    try:
        with open(f"{work.run_dir}/submitted.json", encoding="utf-8") as file:
            recorded = json.load(file)["job_id"]
    except (OSError, ValueError):
        return False
    return bool(recorded != str(attempt.job.root))


def plain(world: World, work: Work, attempt: Attempt) -> int:
    """A job.sh without retries."""
    folder, _, _ = work.run_dir, 0, 0
    if attempt.job.task is not None:
        folder = f"{folder}/{attempt.job.task}"
    if is_late_copy(work, attempt):
        return 0
    started, run = int(world.now), Run(attempt, world.now, 0, process=world.current)
    work.runs.append(run)
    if not os.path.isdir(work.run_dir):  # its shell files are not there
        run.ended, run.code = world.now, 1
        return 1
    write_state(world, attempt, folder, "RUNNING", None, started)
    end = world.now + work.steps * work.step_s
    kill_recorded = None
    caught = False
    while world.now < end:
        until = min(end, kill_recorded if kill_recorded is not None else end)
        if TERM in world.wait_signals(until - world.now):
            caught = True
            if work.on_term == "ignore":
                kill_recorded = world.now + 26.0
            else:
                world.sleep(min(work.save_s, 26.0))
                if work.save_s > 26.0:  # job.sh does not wait for it, as SIGKILL follows
                    write_state(world, attempt, folder, "CANCELLED", 143, started)
                    world.sleep(work.save_s - 26.0)
                run.ended, run.code = world.now, 143
                write_state(world, attempt, folder, "CANCELLED", 143, started)
                return 143
        elif kill_recorded is not None and world.now >= kill_recorded:
            kill_recorded = None
            write_state(world, attempt, folder, "CANCELLED", 143, started)
    if work.code == 0:
        work.completed.append((attempt.job.id, world.now))
    run.ended, run.code = world.now, work.code
    state = "CANCELLED" if caught else "COMPLETED" if work.code == 0 else "FAILED"
    write_state(world, attempt, folder, state, work.code, started)
    return work.code


class Script:
    """The child of node.pyz: job.sh, its launcher, and rank 0, as one process."""

    def __init__(self, world: World, work: Work, attempt: Attempt, parent: Process, environ: dict[str, str]) -> None:
        self.returncode: int | None = None
        self._world = world

        def main() -> int:
            code = _steps(world, work, attempt, environ["HPCJOBS_CONTROL_DIR"])
            self.returncode = code
            world.signal(parent, CHLD)
            return code

        self.process = world.start(f"{parent.name} script", main, host=parent.host)
        self.process.environ.update(environ)
        self.pid = self.process.pid
        attempt.children.append(self.process)

    def poll(self) -> int | None:
        if self.returncode is None and not self.process.alive:
            self.returncode = -9
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._world.signal(self.process, number)


def _steps(world: World, work: Work, attempt: Attempt, control: str) -> int:
    run = Run(attempt, world.now, _number(f"{control}/progress"), process=world.current)
    run.last_step = run.saved = run.first_step
    work.runs.append(run)

    def leave(code: int) -> int:
        put(world, f"{control}/ends/0", f"{code}\n")
        put(world, f"{control}/step_code", f"{code}\n")
        run.ended, run.code = world.now, code
        return code

    def save() -> bool:
        if not work.saves:
            return True
        put(world, f"{control}/steps", f"{run.last_step}\n", tries=1)
        is_saved = put(world, f"{control}/progress", f"{run.last_step}\n", tries=3)
        run.saved = run.last_step if is_saved else run.saved
        return is_saved

    put(world, f"{control}/started/{attempt.nodes[0]}", "")
    while run.last_step < work.steps:
        signals = world.wait_signals(work.step_s)
        if USR1 in signals and run.warned is None:
            run.warned = world.now
        if work.saves and (USR1 in signals or (TERM in signals and work.on_term == "save")):
            world.sleep(work.save_s)
            if save() and put(world, f"{control}/requeue", f"{run.last_step}\n", tries=3):
                return leave(85)
            return leave(1)
        if TERM in signals and (work.on_term == "die" or not work.saves):
            return leave(143)
        run.last_step += 1
        if work.fails_at == run.last_step and (work.fails_always or attempt.job.id not in work.failed_once):
            work.failed_once.add(attempt.job.id)
            put(world, f"{os.path.dirname(control)}/first_failure", f"{work.code} 0 {attempt.nodes[0]}\n", tries=1)
            return leave(work.code)
        if run.last_step % work.save_every == 0:
            save()
    save()
    put(world, f"{control}/completed", "")
    leave(0)
    if run.first_step < work.steps:
        work.completed.append((attempt.job.id, world.now))
    return 0


def _number(path: str) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read().strip() or 0)
    except (OSError, ValueError):
        return 0


def with_retries(world: World, work: Work, attempt: Attempt, arguments: Sequence[str]) -> int:
    """node.pyz, with the package's own code."""
    if not os.path.isdir(work.run_dir):
        return 1
    given = list(arguments)
    if attempt.job.task is not None:
        given[1] = f"{work.run_dir}/{attempt.job.task}"
        os.makedirs(given[1], exist_ok=True)
    try:
        return supervisor.supervise(_parse(tuple(given)))
    except Exception as error:
        world.problems.append(f"node.pyz of job {attempt.job.id} ends with {type(error).__name__}: {error}")
        raise


@functools.cache
def _parse(arguments: tuple[str, ...]) -> conclude.Options:
    return conclude.parse(list(arguments))


def start_script(world: World, of_process: Callable[[], tuple[Work, Attempt]]) -> Callable[..., Any]:
    """`start` of the supervisor: begins the script of the current process's job."""

    def begin(argv: Sequence[str], *, env: dict[str, str], stdin: object = None) -> Script:
        work, attempt = of_process()
        assert world.current is not None
        return Script(world, work, attempt, world.current, env)

    return begin


def body_of(world: World, works: dict[str, Work], arguments: dict[str, list[str]]) -> Callable[[Job], Any]:
    """The body of a job, by the script that it was given."""

    def find(job: Job) -> Callable[[Attempt], int]:
        work = works[str(Path(job.script).parent)]
        if work.retries:
            return lambda attempt: with_retries(world, work, attempt, arguments[work.run_dir])
        return lambda attempt: plain(world, work, attempt)

    return find


step._OWN = os.devnull
