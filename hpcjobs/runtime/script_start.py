"""A training script's side of a job: its place in the world, metrics, checkpoints, and stopping together.

    import hpcjobs.runtime

    run = hpcjobs.runtime.start(total_steps=1000)
    state = run.load() or new_state()                      # the newest state; None at the first start
    for step in range(run.step + 1, 1001):
        loss = train(state)
        run.log(step, loss=loss, tokens=4096)
        if run.should_stop() or step % 100 == 0:
            run.save(step, state)
        if run.stopping:
            run.leave()                                    # exit code 85: the job starts again, and resumes here
    run.finish(loss=loss)

docs/own_scripts.md explains it. Only the standard library is needed; torch is loaded where a state has tensors.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcjobs.runtime.dist import DistEnv, choose_run_dir, export_ranks, refuse_less_than_one, refuse_other_world
from hpcjobs.runtime.exits import UsageError, report_error
from hpcjobs.runtime.run import Run
from hpcjobs.runtime.tracking import require_trackers

_started: list[Run] = []
"""The newest run of this process, once there is one."""


def start(
    *,
    name: str | None = None,
    total_steps: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    step: int | None = None,
    keep: int = 2,
    reduce: Callable[[int], int] | None = None,
    steps_apart: int = 1,
    log_to: Sequence[str] = (),
) -> Run:
    """Begin a run, on every rank, before the first step and from the main thread.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where the launcher has not, so that
    `torch.distributed.init_process_group()` works after it under srun and mpirun too.

    Args:
        name: of the run, in its files; the script's name if None.
        total_steps: for the time left, and for progress such as "step 120 of 1000".
        run_dir: the folder for files, where hpcjobs has not started the program; `runs/NAME` if None.
        step: the step at which the program resumes, if it loads its checkpoints itself.
        keep: number of newest checkpoints to keep; the best stays too.
        reduce: takes a number and returns the largest one of all ranks, such as
            ``lambda mine: comm.allreduce(mine, op=MPI.MAX)``. `should_stop()` then calls it at every step. By default
            ranks agree over the store of torch.distributed, or over files of the run folder.
        steps_apart: how many steps a rank may be ahead of another one: more than 1 where ranks seldom meet.
        log_to: programs that get a copy of the metrics, from rank 0: "tensorboard", "wandb", "mlflow".

    Raises:
        UsageError, WorldMismatch: rank and world size cannot be right, or `start()` was called before.
        BadCheckpoint: there are checkpoints, and all of them are damaged.
    """
    if _started and not _started[-1].ended:
        raise UsageError("hpcjobs.runtime.start() was called before", hint="once in a program; finish() ends the run")
    # From here on, so that the errors of this function are one line with an exit code of their own too.
    hook, sys.excepthook = sys.excepthook, report_error
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("hpcjobs.runtime.start() was called in a thread", hint="signals reach the main thread alone")
    refuse_less_than_one(keep=keep, steps_apart=steps_apart, total_steps=total_steps)
    log_to = (log_to,) if isinstance(log_to, str) else tuple(log_to)
    require_trackers(log_to)
    env = DistEnv.from_environ(os.environ)
    refuse_other_world(env, os.environ)
    export_ranks(env)
    name = name or Path(sys.argv[0] or "script").stem.lstrip("-") or "script"
    if not name.isprintable():
        raise UsageError(
            f"the run's name is {name!r}, expected printable text", hint="start(name=...) gives another one"
        )
    run = Run(
        env,
        choose_run_dir(run_dir, name, env),
        name=name,
        total_steps=total_steps,
        step=step,
        keep=keep,
        reduce=reduce,
        steps_apart=steps_apart,
        hook=hook,
        log_to=log_to,
    )
    _started[:] = [run]
    return run
