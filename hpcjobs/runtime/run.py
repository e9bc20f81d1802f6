"""A training script's side of a job: its place in the world, metrics, checkpoints, and stopping together.

    import hpcjobs.runtime

    run = hpcjobs.runtime.start(total_steps=1000)
    state = run.load() or new_state()                      # what was saved last; None at the first start
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

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hpcjobs.runtime import signals
from hpcjobs.runtime.agreement import Board, FileBoard, StopAgreement, find_store, name_attempt
from hpcjobs.runtime.checkpoints import FOLDER, CheckpointMeta
from hpcjobs.runtime.dist import DistEnv, gpus_on_node, refuse_other_world
from hpcjobs.runtime.exits import ExitCode, TrainerError, UsageError
from hpcjobs.runtime.job_control import JobControl
from hpcjobs.runtime.script_checkpoints import Part, ScriptCheckpoints
from hpcjobs.runtime.script_env import choose_run_dir, count_gpus, export_ranks, refuse_less_than_one, report_error
from hpcjobs.runtime.script_stall import Heartbeat, report_stacks
from hpcjobs.runtime.script_summary import make_summary, read_result
from hpcjobs.runtime.step_log import StepLog, read_number, read_step, refuse_infinite_epoch
from hpcjobs.runtime.streams import flush, print_error
from hpcjobs.runtime.summary import SUMMARY_FILE, RunSummary
from hpcjobs.runtime.tracking import require_trackers

LAST_SAVE_S = 120.0
"""A run that ends or stops tries this long to write its last checkpoint."""
_open: list[Run] = []


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
        step: the step at which the program resumes, where it loads checkpoints of its own; else that of `load()`.
        keep: so many of the newest checkpoints are kept, and the best.
        reduce: takes a number and returns the largest one of all ranks, such as
            ``lambda mine: comm.allreduce(mine, op=MPI.MAX)``. `should_stop()` then calls it at every step. Without it
            ranks agree over the store of torch.distributed, else over files of the run folder.
        steps_apart: how many steps a rank may be ahead of another one: more than 1 where ranks seldom meet.
        log_to: programs that get a copy of the metrics, from rank 0: "tensorboard", "wandb", "mlflow".

    Raises:
        UsageError, WorldMismatch: rank and world size cannot be right, or `start()` was called before.
        BadCheckpoint: there are checkpoints, and all of them are damaged.
    """
    if _open:
        raise UsageError("hpcjobs.runtime.start() was called before", hint="once in a program; finish() ends the run")
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
    _open.append(run)
    return run


class Run:
    """One rank's part of a run; made by `start()`.

    Attributes:
        env: rank, world size and the rest, as `DistEnv`.
        run_dir: the folder of the run, the same on every rank.
        step: finished steps of the checkpoint from which this start resumes; 0 without one.
        stopping: whether `should_stop()` has returned True.
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
        hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
        log_to: Sequence[str] = (),
    ) -> None:
        self.env, self.run_dir, self.name, self.total_steps = env, run_dir, name, total_steps
        self._log_to = tuple(log_to)
        self.attempt = name_attempt(os.environ)
        """Names this start of the program: a requeued job has another one."""
        in_job = signals.control_dir() is not None
        self._stop = signals.listen() if in_job else signals.Stop()  # at once: a signal kills who does not listen yet
        self._listens = in_job
        self._control = JobControl(self._stop if in_job else None, rank=env.rank)
        if env.rank == 0:
            (run_dir / SUMMARY_FILE).unlink(missing_ok=True)  # of the start before
        self._checkpoints = ScriptCheckpoints(
            run_dir / FOLDER,
            env,
            attempt=self.attempt,
            keep=keep,
            step=step,
            report=self.print,
            on_written=self._control.record_saved_step,
        )
        self.step = self._newest_step = self._checkpoints.resumed_step
        self._log = self._open_log()
        self._agreement = StopAgreement(
            self._stop,
            rank=env.rank,
            world_size=env.world_size,
            open_board=self._open_board,
            reduce=reduce,
            apart=steps_apart,
        )
        self._heartbeat: Heartbeat | None = None
        self._main = threading.get_ident()
        self._hook = hook
        sys.excepthook = self._record_failure
        atexit.register(self._flush_at_exit)
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
        """The number of this process among those of its host, from 0."""
        return self.env.local_rank

    @property
    def device_index(self) -> int | None:
        """The GPU of this rank among those that it sees; None: it sees none.

        Raises:
            BadConfiguration: ranks would share GPUs.
        """
        visible = count_gpus()
        return self.env.device_index(visible, on_node=gpus_on_node(os.environ)) if visible else None

    @property
    def device(self) -> str:
        """The same as torch spells it: ``cuda:1``, or ``cpu``."""
        index = self.device_index
        return "cpu" if index is None else f"cuda:{index}"

    def print(self, text: str) -> None:
        """A line on standard output, from rank 0."""
        if self.env.rank == 0:
            print(text, flush=True)

    # --- metrics

    def log(self, step: int, **values: Any) -> None:
        """Record numbers of a step; `step` counts finished steps. Rank 0 writes them, within a second.

        ``loss``, ``lr`` and ``epoch`` have places of their own in metrics.jsonl; ``tokens``, ``samples`` or ``images``
        are what this rank used since the call before, and give the throughput of all ranks. Every other name is a
        metric of yours. Tensors of one element are numbers too; those of a GPU are read when lines are written.

        Raises:
            TypeError: a value is no number; the message names the key.
        """
        if type(step) is not int or step < 0:
            step = read_step(step, "log")
        for key, value in values.items():
            if type(value) is not float and type(value) is not int:
                values[key] = read_number(key, value)
        if "epoch" in values:
            refuse_infinite_epoch(values["epoch"])
        self._newest_step = step
        wrote = self._log.add(step, values)
        if self._heartbeat is not None:
            self._heartbeat.beat(step)
        if wrote:
            self._control.record_step(step)
            if self._heartbeat is not None:
                self._heartbeat.update_limit()

    # --- stopping

    def should_stop(self) -> bool:
        """Whether to stop after this step: the same answer on all ranks, each of which calls it at every step.

        True after the job was told to end: ahead of its time limit, of a preemption, or by ``kill``. Then save, and
        call `leave()`. Costs no collective call, unless `start()` was given ``reduce``.
        """
        if not self._listens:
            self.listen()
        if self._heartbeat is not None:
            self._heartbeat.beat(self._newest_step)
        return self._agreement.decide()

    @property
    def stopping(self) -> bool:
        """Whether `should_stop()` has returned True."""
        return self._agreement.why is not None

    def leave(self) -> NoReturn:
        """End the program with code 85, once what was saved is on disk: the job is started again, and resumes there.

        Raises:
            SystemExit: always, unless
            StorageFault: the last checkpoint cannot be written; exit code 20.
        """
        self._finish_saving()
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

    def save(self, step: int, state: Any, *, sharded: bool = False, epoch: int = 0, loss: float | None = None) -> None:
        """Save `state` after finished `step`; on every rank. Rank 0 writes, or each rank its own with `sharded`.

        Returns once the state is copied; a thread writes it beside its place, syncs it, adds checksums and renames it.
        A second call waits for the first. Storage that fails is a warning, and is tried again at later saves.

        Args:
            state: any value that can be pickled; one of plain values becomes JSON, one with tensors torch's format.
            sharded: `state` is this rank's part, and `load()` gives each rank its own.
            loss: of held-out data; the checkpoint with the least is kept as ``checkpoints/best``.

        Raises:
            TypeError, ValueError: the state cannot be written, or `step` is no number of finished steps.
        """
        if self not in _open:
            raise RuntimeError("save() after finish(): the run has ended")
        step = read_step(step, "save")
        loss = None if loss is None else float(read_number("loss", loss, "save"))
        self._checkpoints.saved_step = step
        if self.env.rank == 0 or sharded:
            meta = CheckpointMeta(
                step=step,
                epoch=epoch,
                epoch_samples=0,
                world_size=self.env.world_size,
                metrics_bytes=self._log.tell(),
                loss=loss,
            )
            self._checkpoints.save(meta, Part(state, sharded), last=self.stopping or step == self.total_steps)
        if self.env.rank == 0:
            self._log.write("checkpoint", step=step, stall_s=self._checkpoints.stall_s[-1])
            self._control.record_step(max(step, self._newest_step))
            self._control.publish_times(tuple(self._log.step_s), self._checkpoints.write_s)

    def load(self, *, rank: int | None = None) -> Any:
        """The state that was saved at `step`, or None; tensors on the CPU. Of a sharded one the part of this rank.

        `rank` gives the part of another one.

        Raises:
            BadCheckpoint: it cannot be read, or is sharded for a world of another size.
            WorldMismatch: ranks see different checkpoints: the run folder is not on a file system that all share.
        """
        return self._checkpoints.load(rank)

    def record_saved_step(self, step: int) -> None:
        """A checkpoint of the program's own, after finished `step`, is on disk: only later steps can be lost."""
        step = self._checkpoints.saved_step = read_step(step, "record_saved_step")
        if self.env.rank == 0:
            self._control.record_saved_step(step)
            self._control.record_step(max(step, self._newest_step))

    # --- for programs whose loop is another library's

    def resume(self, step: int, *, total_steps: int | None = None) -> None:
        """Begin the lines of metrics at `step`: where a library loads checkpoints, and says only then where it resumes.

        Lines of later steps, which an earlier start has written, are cut.
        """
        self.step = self._newest_step = read_step(step, "resume")
        self._checkpoints.resume_at(self.step)
        self.total_steps = self.total_steps if total_steps is None else total_steps
        self._log.close()
        self._log = self._open_log()

    def listen(self) -> None:
        """Hear the signals that ask to stop, though another library has put its own handlers in place."""
        signals.listen_with(self._stop)
        self._listens = True

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

        Raises:
            TypeError: a result is not of JSON's types; the message names the key.
        """
        for key, value in results.items():
            results[key] = read_result(key, value)
        if self.stopping:
            self.leave()
        self._finish_saving()
        self._log.write("end", step=self._newest_step, elapsed_s=self._log.elapsed_s)
        if self.env.rank == 0:
            self._control.record_step(self._newest_step)
            self._make_summary(results).write(self.run_dir)
        self._close()

    # --- a run that stands still

    def watch(self, *, after_s: float | None = None) -> None:
        """From now on end the run with code 19 if nothing moves any more, and say which rank the others wait for.

        Signs of life are calls of `log()` and `should_stop()`. Each rank writes its stacks and its last collectives
        (torch's flight recorder) to ``stalled/rank-N.txt``.

        Args:
            after_s: so long without a sign of life; if None, 30 times the newest steps, at least 5 minutes.
        """
        self._heartbeat = Heartbeat(self.env, self.run_dir, after_s=after_s)

    def write_report(self) -> Path:
        """Write this rank's stacks and last collectives, as they are now, to ``stalled/rank-N.txt``. The file."""
        return report_stacks(self.run_dir, rank=self.env.rank, step=self._newest_step, main_thread=self._main)

    # --- inside

    def _open_log(self) -> StepLog:
        return StepLog(
            self.run_dir,
            name=self.name,
            rank=self.env.rank,
            world_size=self.env.world_size,
            first_step=self.step,
            total_steps=self.total_steps,
            log_to=self._log_to,
        )

    def _open_board(self) -> Board:
        prefix = f"stop/{self.attempt}"
        place = signals.control_dir() or self.run_dir
        return find_store(prefix) or FileBoard(place / f".stop-{self.attempt}", rank=self.env.rank)

    def _finish_saving(self) -> None:
        self._checkpoints.finish(within_s=min(self._control.left_s, LAST_SAVE_S))

    def _make_summary(
        self, results: dict[str, Any], *, code: int = ExitCode.OK, error: str | None = None
    ) -> RunSummary:
        return make_summary(
            self._log,
            step=self._newest_step,
            stall_s=self._checkpoints.stall_s,
            results=results,
            code=code,
            error=error,
        )

    def _close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._checkpoints.close()
        self._log.close()
        self._control.close()
        self._agreement.close()
        if sys.excepthook == self._record_failure:
            sys.excepthook = self._hook
        atexit.unregister(self._flush_at_exit)
        if self in _open:
            _open.remove(self)

    def _flush_at_exit(self) -> None:
        self._log.flush()

    def _record_failure(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The summary of a run that failed; an error of ours is one line, and its own exit code."""
        self._log.flush()
        code = error.code if isinstance(error, TrainerError) else int(ExitCode.CRASH)
        if self.env.rank == 0 and kind is not KeyboardInterrupt:
            text = " ".join(f"{kind.__name__}: {error}".split())
            try:
                self._make_summary({}, code=code, error=text).write(self.run_dir)
            except OSError as full:  # the error itself is still to be told
                print_error(f"warning: no summary in {self.run_dir}: {full}")
        if isinstance(error, TrainerError):
            report_error(kind, error, trace)
        self._hook(kind, error, trace)
