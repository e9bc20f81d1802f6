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

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hpcjobs.record import SUMMARY
from hpcjobs.runtime import signals
from hpcjobs.runtime.checkpoints import FOLDER, CheckpointMeta
from hpcjobs.runtime.dist import (
    DistEnv,
    choose_run_dir,
    count_gpus,
    export_ranks,
    gpus_on_node,
    refuse_less_than_one,
    refuse_other_world,
)
from hpcjobs.runtime.exits import ExceptionHook, ExitCode, ExitHooks, StorageFault, UsageError, flush, report_error
from hpcjobs.runtime.script_checkpoints import Part, ScriptCheckpoints
from hpcjobs.runtime.signals import JobControl, StopAgreement, clear_board, name_attempt, open_board
from hpcjobs.runtime.step_log import StepLog, make_summary, read_number, read_result, read_step, require_trackers
from hpcjobs.runtime.watchdog import Heartbeat, report_stacks


class Run:
    """One rank's part of a run; made by `start()`.

    Attributes:
        env: rank, world size and the rest, as `DistEnv`.
        run_dir: the folder of the run, the same on every rank.
        step: finished steps of the checkpoint that this start resumes; 0 without a checkpoint.
        stopping: whether `should_stop()` has returned True.
        ended: whether the run is closed, by `finish()` or `leave()`.
    """

    def __init__(
        self,
        env: DistEnv,
        run_dir: Path,
        *,
        name: str,
        total_steps: int | None,
        step: int | None,
        keep: int,
        reduce: Callable[[int], int] | None,
        steps_apart: int,
        hook: ExceptionHook,
        log_to: Sequence[str] = (),
    ) -> None:
        self.env = env
        self.run_dir, self.name, self.total_steps = run_dir, name, total_steps
        self.attempt = name_attempt(os.environ)
        """Names this start of the program: a requeued job has another one."""
        in_job = signals.control_dir() is not None
        self._stop = signals.listen() if in_job else signals.Stop()  # at once: a signal kills who does not listen yet
        self._listens = in_job
        self._control = JobControl(self._stop if in_job else None, rank=env.rank)
        board_dir = signals.control_dir() or run_dir
        if env.rank == 0:  # files of the previous start
            (run_dir / SUMMARY).unlink(missing_ok=True)
            clear_board(board_dir, self.attempt)
        self._checkpoints = ScriptCheckpoints(
            run_dir / FOLDER,
            env,
            attempt=self.attempt,
            keep=keep,
            step=step,
            control=self._control,
            report=self.print,
            record=self._log_checkpoint,
            step_s=lambda: tuple(self._log.step_s),
        )
        self.step = self._newest_step = self._checkpoints.resumed_step
        self._open_log = partial(StepLog, run_dir, name=name, env=env, log_to=log_to)
        self._log = self._open_log(first_step=self.step, total_steps=total_steps)
        self._agreement = StopAgreement(
            self._stop,
            rank=env.rank,
            world_size=env.world_size,
            open_board=partial(open_board, board_dir, self.attempt, rank=env.rank),
            reduce=reduce,
            apart=steps_apart,
        )
        self._heartbeat: Heartbeat | None = None
        self.ended = False
        self._exit_hooks = ExitHooks(run_dir, self.flush, self._record_failure, hook=hook)
        self.print(f"run folder {run_dir}" + (f", resumed at step {self.step}" if self.step else ""))

    # --- the place of this process

    @property
    def rank(self) -> int:
        """The number of this process among all of the job, from 0."""
        return self.env.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.env.world_size

    @property
    def local_rank(self) -> int:
        """The number of this process on its host, from 0."""
        return self.env.local_rank

    @property
    def device_index(self) -> int | None:
        """The index of this rank's GPU among its visible ones; None without a GPU.

        Raises BadConfiguration: ranks would share GPUs.
        """
        visible = count_gpus()
        return self.env.device_index(visible, on_node=gpus_on_node(os.environ)) if visible else None

    @property
    def device(self) -> str:
        """The device in torch's notation: ``cuda:1``, or ``cpu``."""
        index = self.device_index
        return "cpu" if index is None else f"cuda:{index}"

    def print(self, text: str) -> None:
        """A line on standard output, from rank 0."""
        if self.env.rank == 0:
            print(text, flush=True)

    # --- metrics

    def log(self, step: int, **values: Any) -> None:
        """Record numbers of a step; `step` counts finished steps. Rank 0 writes them, within a second.

        ``loss``, ``lr`` and ``epoch`` are keys of metrics.jsonl. ``tokens``, ``samples`` or ``images`` count the work
        of this rank since the previous call, and give the throughput of all ranks. Every other name is a metric of
        yours. Tensors of one element are numbers too; GPU tensors are read when lines are written.

        Raises TypeError: a value is not a number; the message names the key.
        """
        if type(step) is not int or step < 0:  # at every step: the usual types are known without a call
            step = read_step(step, "log")
        for key, value in values.items():
            if type(value) is not float and type(value) is not int:
                values[key] = read_number(key, value)
        if "epoch" in values and isinstance(epoch := values["epoch"], float) and not math.isfinite(epoch):
            raise ValueError(f"log(): epoch is {epoch}, expected a finite number")
        self._newest_step = step
        wrote = self._log.add(step, values)
        if self._heartbeat is not None:
            self._heartbeat.beat(step)
        if wrote:
            self._checkpoints.record_written()
            self._control.record_step(step)
            if self._heartbeat is not None:
                self._heartbeat.update_limit()

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Exclude the time of a block, such as an evaluation, from the steps. `save()` is always excluded."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.exclude(time.perf_counter() - began)

    # --- stopping

    def should_stop(self) -> bool:
        """Whether to stop after this step: the same answer on all ranks. Call it on every rank at every step.

        True after the job was told to end: ahead of its time limit, of a preemption, or by ``kill``. Then save, and
        call `leave()`. Costs no collective call, unless `start()` was given ``reduce``.
        """
        if not self._listens:  # started by hand, a script that never asks is still ended by `kill`
            self.listen()
        if self._heartbeat is not None:
            self._heartbeat.beat(self._newest_step)
        return self._agreement.decide()

    @property
    def stopping(self) -> bool:
        """Whether `should_stop()` has returned True."""
        return self._agreement.why is not None

    def leave(self) -> NoReturn:
        """End the program with code 85, once the saved state is on disk: the job is started again, and resumes there.

        Raises SystemExit: always. StorageFault: the last checkpoint, metrics or summary cannot be written; exit code
        20. LossNotFinite: the last state has NaN; exit code 13.
        """
        self._finish_saving()
        with self._needing_storage():
            self._log.close()
            if self.env.rank == 0:
                self._control.record_step(self._newest_step)
                signals.request_requeue(self._checkpoints.saved_step)
        why = self._agreement.why or "the program's own decision"
        again = "asks to be started again" if signals.control_dir() is not None else "start it again to go on"
        self.print(
            f"stopped by {why} after step {self._newest_step}, saved at step {self._checkpoints.saved_step}; {again}"
        )
        self._close()
        signals.ignore()
        flush()
        sys.exit(int(ExitCode.REQUEUE))

    # --- checkpoints

    def save(
        self,
        step: int,
        state: Any,
        *,
        sharded: bool = False,
        epoch: int = 0,
        loss: float | None = None,
        allow_nan: bool = False,
    ) -> None:
        """Save `state` after finished `step`; call it on every rank. Rank 0 writes, or every rank with `sharded`.

        Returns once the state is copied; a thread writes it to a temporary folder, syncs it, adds checksums and renames
        the folder. A second call waits for the first. Storage that fails is a warning, and later saves try again;
        `finish()` and `leave()` wait until the last saved state is on disk.

        Args:
            state: any value that can be pickled; one of plain values becomes JSON, one with tensors torch's format.
            sharded: `state` is this rank's part, and `load()` returns it on the same rank.
            loss: of held-out data; the checkpoint with the least is kept as ``checkpoints/best``.
            allow_nan: write the state though a tensor of it has NaN; by default it is not written, with a warning.

        Raises:
            TypeError, ValueError: the state cannot be written, or `step` is not a number of finished steps.
        """
        if self.ended:
            raise RuntimeError("save() after finish(): the run has ended")
        step = read_step(step, "save")
        loss = None if loss is None else float(read_number("loss", loss, "save"))
        self._checkpoints.saved_step = step
        if self.env.rank == 0 or sharded:
            with self.exclude_time():
                meta = CheckpointMeta(step, epoch, 0, self.env.world_size, self._log.tell(), loss)
                self._checkpoints.write(
                    meta, Part(state, sharded, allow_nan), last=self.stopping or step == self.total_steps
                )
            self._control.record_step(max(step, self._newest_step))

    def load(self, *, rank: int | None = None) -> Any:
        """Load the state of `step`, or None; tensors on the CPU. A sharded state gives this rank's part.

        `rank` gives the part of another one.

        Raises BadCheckpoint: it cannot be read, or is sharded for a world of another size. WorldMismatch: ranks see
        different checkpoints: the run folder is not on a file system that all share.
        """
        return self._checkpoints.load(rank)

    def record_saved_step(self, step: int) -> None:
        """A checkpoint of the program's own, after finished `step`, is on disk: only later steps can be lost."""
        step = self._checkpoints.saved_step = read_step(step, "record_saved_step")
        if self.env.rank == 0:
            self._control.record_saved_step(step)
            self._control.record_step(max(step, self._newest_step))

    # --- for programs with the loop of a library

    def resume(self, step: int, *, total_steps: int | None = None) -> None:
        """Begin the lines of metrics at `step`: where a library loads checkpoints, and says only then where it resumes.

        Lines of later steps, which an earlier start has written, are cut.
        """
        self.step = self._newest_step = read_step(step, "resume")
        self._checkpoints.resume_at(self.step)
        self.total_steps = self.total_steps if total_steps is None else total_steps
        self._log.close()
        self._log = self._open_log(first_step=self.step, total_steps=self.total_steps)

    def listen(self) -> None:
        """Install the handlers of stop signals again, after another library has replaced them."""
        signals.listen_with(self._stop)
        self._listens = True

    def exclude(self, seconds: float) -> None:
        """Exclude this time since the newest line from the steps, such as an evaluation or a checkpoint."""
        self._log.exclude(seconds)

    def flush(self) -> None:
        """Have every line of metrics in its file."""
        self._log.flush()

    @property
    def metrics_bytes(self) -> int:
        """Bytes of metrics.jsonl with all that was logged, on rank 0; 0 on the others."""
        return self._log.tell()

    # --- the end

    def finish(self, **results: Any) -> None:
        """End the run: the last checkpoint is on disk, and rank 0 writes summary.json, with `results`.

        After `should_stop()` has returned True this is `leave()`: the run is not complete.

        Raises TypeError: a result is not of JSON's types; the message names the key. StorageFault: the last checkpoint,
        metrics or summary cannot be written; exit code 20. LossNotFinite: the last state has NaN; exit code 13.
        """
        for key, value in results.items():
            results[key] = read_result(key, value)
        if self.stopping:
            self.leave()
        self._finish_saving()
        self._log.write("end", step=self._newest_step, elapsed_s=self._log.elapsed_s)
        self._control.record_step(self._newest_step)
        with self._needing_storage():
            self._write_summary(results)
            self._close()

    # --- stalled runs

    def watch(self, *, after_s: float | None = None) -> None:
        """Start the watchdog: it ends a stalled run with code 19, and names the rank that is behind.

        Signs of life are calls of `log()` and `should_stop()`. Each rank writes its stacks and its last collectives
        (torch's flight recorder) to ``stalled/rank-N.txt``.

        Args:
            after_s: limit without a sign of life; if None, 30 times the newest steps, at least 5 minutes.
        """
        self._heartbeat = Heartbeat(self.env, self.run_dir, after_s=after_s)

    def write_report(self) -> Path:
        """Write this rank's current stacks and last collectives to ``stalled/rank-N.txt``. Returns the file."""
        return report_stacks(self.run_dir, rank=self.env.rank, step=self._newest_step)

    # --- inside

    def _finish_saving(self) -> None:
        with nullcontext() if self._heartbeat is None else self._heartbeat.suspend():
            self._checkpoints.finish()

    def _log_checkpoint(self, step: int, stall_s: float) -> None:
        if self.env.rank == 0:
            self._log.write("checkpoint", step=step, stall_s=stall_s)

    @contextmanager
    def _needing_storage(self) -> Iterator[None]:
        """Inside, storage that fails is a StorageFault."""
        try:
            yield
        except OSError as error:
            raise StorageFault(
                f"{error.filename2 or error.filename or self.run_dir} can't be written: {error.strerror or error}",
                hint="free space or quota there; the last checkpoint is complete, the next start finds it",
            ) from error

    def _write_summary(self, results: dict[str, Any], *, code: int = ExitCode.OK, error: str | None = None) -> None:
        if self.env.rank == 0:
            stall_s = self._checkpoints.stall_s
            make_summary(self._log, stall_s=stall_s, results=results, code=code, error=error).write(self.run_dir)

    def _record_failure(self, code: int, error_message: str) -> None:
        self._write_summary({}, code=code, error=error_message)

    def _close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._checkpoints.close()
        self._log.close()
        self._control.close()
        self._agreement.close()
        self._exit_hooks.remove()
        self.ended = True


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
