"""A run around its loop: the world, the workload and the record are opened here, and closed into a summary."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch

from hpcjobs.record.names import SUMMARY
from hpcjobs.record.summary import Quantiles, RunSummary
from hpcjobs.runtime import signals
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import Requeue, UnequalData, UsageError
from hpcjobs.runtime.signals import JobControl, StopAgreement
from hpcjobs.runtime.tracking import Trackers, open_trackers, require_trackers
from hpcjobs.runtime.watchdog import Watchdog
from hpcjobs.trackers import TrackedRun
from hpcjobs.trainers.commandline.config import Config
from hpcjobs.trainers.commandline.launch import Call, collect_new_objects
from hpcjobs.trainers.data.staging import stage_data
from hpcjobs.trainers.data.training import TrainingData, adapt_datasets, resolve_workers
from hpcjobs.trainers.distributed.process_group import RankGroup, describe_shared_cores, format_cores, join_world
from hpcjobs.trainers.loop.checkpointing import Checkpoints, PipelinedMax, resume_run
from hpcjobs.trainers.loop.evaluation import Evaluator
from hpcjobs.trainers.metrics.monitor import Monitor
from hpcjobs.trainers.metrics.profiler import StepProfiler, record_memory
from hpcjobs.trainers.metrics.recorder import Recorder
from hpcjobs.trainers.optimization.plan import TrainingPlan, grow_synthetic, plan_training
from hpcjobs.trainers.optimization.step import Stepper
from hpcjobs.trainers.strategies.base import Strategy
from hpcjobs.trainers.workloads import load_workload
from hpcjobs.trainers.workloads.base import Workload


@dataclass(frozen=True)
class TrainingRun:
    """One rank's part of a run, for our loop or Lightning's."""

    call: Call[Any]
    group: RankGroup
    workload: Workload
    plan: TrainingPlan
    run_dir: Path
    stepper: Stepper
    resumed: CheckpointMeta | None
    recorder: Recorder
    evaluator: Evaluator
    checkpoints: Checkpoints
    monitor: Monitor
    control: JobControl
    agreement: StopAgreement | None
    """On stopping; None where no job script would start the run again."""
    watchdog: Watchdog
    profiler: StepProfiler

    @property
    def config(self) -> Config:
        return self.call.config

    @property
    def first_step(self) -> int:
        return 0 if self.resumed is None else self.resumed.step

    def make_training_data(self) -> TrainingData:
        return TrainingData(self.workload.train, self.config, self.group, plan=self.plan)

    def end_step(self, step: int, epoch: int) -> None:
        """After every step: write its line, evaluate and save where that is due, and stop where that was requested."""
        self.profiler.stop_if_due(step)
        self.control.record_step(step)
        self.watchdog.beat(step, "data")
        saves, evaluates = self.checkpoints.due(step), self.evaluator.due(step)
        ends = self.plan.ends_epoch(step) or step == self.plan.total_steps
        if saves or evaluates or ends or step % self.config.log_every == 0:
            self.recorder.flush(step, epoch)
            self.checkpoints.record_written()
            self.watchdog.update_limit()
        if evaluates:
            self.evaluate(step, epoch)
        if saves:  # after the evaluation: its loss decides which checkpoint is the best
            self.checkpoints.save(step, epoch)
        if self.plan.ends_epoch(step):
            self.recorder.end_epoch(step, epoch)
        self.stop_if_asked(step, epoch)
        self.profiler.start_if_due(step)

    def stop_if_asked(self, step: int, epoch: int) -> None:
        """Stop the run if all ranks agreed to: all ranks call this equally often, and leave together."""
        if self.agreement is None or not self.agreement.decide():
            return
        self.recorder.flush(step, epoch)
        with self.watchdog.suspend():
            self.checkpoints.save(step, epoch, blocking=True)
            self.group.barrier()
        if self.group.rank == 0:
            signals.request_requeue(step)
        stopped = f"stopped by {self.agreement.why} after step {step}"
        self.group.log(f"{stopped}, saved; asks to be started again")
        raise Requeue(stopped)

    def evaluate(self, step: int, epoch: int) -> None:
        """Scores the held-out part; a collective call."""
        with self.recorder.time_evaluation():
            result = self.evaluator.evaluate(boundary=lambda: self._evaluating(step, epoch))
        self.recorder.record_evaluation(result, step, epoch)

    def evaluate_resumed(self) -> None:
        """Scores a resumed model if its step is due for evaluation: the metrics it kept end before that evaluation.

        A checkpoint that was saved because the attempt was stopped during that evaluation is saved again with its loss.
        """
        step = self.first_step
        if self.resumed is not None and self.evaluator.due(step):
            epoch = self.plan.epoch_of(step)
            self.evaluate(step, epoch)
            if self.resumed.loss is None and self.checkpoints.due(step):
                self.checkpoints.save(step, epoch)

    def _evaluating(self, step: int, epoch: int) -> None:
        self.watchdog.beat(step, "evaluation")
        self.stop_if_asked(step, epoch)

    def finish(self, *, exposed_s: Sequence[float], compute_s: Sequence[float]) -> RunSummary:
        """The summary, once the last checkpoint is on disk; a collective call.

        Raises:
            LossNotFinite: the held-out loss of the trained model is NaN or infinite.
        """
        with self.watchdog.suspend():
            self.checkpoints.finish()
            self.group.barrier()  # the other ranks wait for the writer
        self.recorder.check_result()
        self.profiler.close()
        strategy, config = self.stepper.strategy, self.config
        traffic = strategy.traffic(self.stepper.model) if self.group.world_size > 1 else None
        summary = self.recorder.finish(
            steps=self.plan.total_steps,
            resumed_from_step=None if self.resumed is None else self.resumed.step,
            exposed_communication_s=Quantiles.of(exposed_s),
            compute_s=compute_s,
            checkpoint_stall_s=Quantiles.of(self.checkpoints.stall_s),
            trainer=self.call.trainer,
            strategy=strategy.name,
            monitor=self.monitor.summary(),
            backend=strategy.backend or self.group.backend,
            job_id=os.environ.get("HPCJOBS_JOB_ID"),
            precision=config.precision,
            tf32=config.tf32,
            parameters=self.stepper.parameters,
            bytes_moved_per_step=None if traffic is None else traffic.bytes,
            collectives_per_step=None if traffic is None else traffic.calls,
            config={**asdict(config), **asdict(self.call.flags), **asdict(self.call.workload_flags)},
        )
        self.group.log(describe_result(summary, self.run_dir))
        return summary


@contextmanager
def open_run(call: Call[Any], strategy: Strategy) -> Iterator[TrainingRun]:
    """Open everything that a loop needs; errors become TrainerError, and one elected rank reports them."""
    config = call.config
    require_trackers(config.log_to)
    with (
        join_world(
            call.env,
            device=config.device,
            timeout_s=config.rendezvous_timeout_s,
            stall_after_s=config.stall_after,
        ) as group,
        ExitStack() as stack,
    ):
        log_topology(group)
        workload = adapt_datasets(load_workload(stage_data(config, group), call.workload_flags))
        workload = grow_synthetic(config, workload, group.world_size)
        config = resolve_workers(config, workload.train, group)
        call = replace(call, config=config)
        set_numerics(config, workload)
        refuse_unequal_data(group, workload)
        plan = plan_training(config, workload, group.world_size, fill=strategy.fills)
        run_dir = choose_run_dir(call, group)
        stack.enter_context(record_memory(group, run_dir, on=config.memory_snapshot))
        stepper = Stepper(config, workload, strategy, group=group, plan=plan)
        if workload.flops_per_sample is not None:
            workload = replace(workload, flops_per_sample=stepper.flops_share * workload.flops_per_sample)
        group.log(describe_run(call.trainer, workload, plan, stepper, run_dir))
        warn_of_small_share(group, plan)
        resumed = resume_run(config, stepper, run_dir, plan=plan, group=group)
        if resumed is not None:
            plan = plan.resume_at(resumed.epoch, resumed.epoch_samples, done=resumed.step)
        evaluator = Evaluator(config, workload, stepper, plan=plan, group=group)
        with (
            Recorder(
                group, plan, workload, run_dir, resumed=resumed, trackers=start_trackers(call, group, run_dir, resumed)
            ) as recorder,
            closing(JobControl(call.stop, rank=group.rank)) as control,
            closing(PipelinedMax()) as largest,
            Checkpoints(config, run_dir, stepper, recorder, control, plan=plan, group=group) as checkpoints,
            Monitor(group, run_dir, on=config.monitor) as monitor,
            closing(make_watchdog(call, group, run_dir, recorder)) as watchdog,
        ):
            collect_new_objects()
            yield TrainingRun(
                call,
                group,
                workload,
                plan,
                run_dir,
                stepper,
                resumed,
                recorder,
                evaluator,
                checkpoints,
                monitor,
                control,
                make_agreement(call, group, largest),
                watchdog,
                StepProfiler(config.profile, group, run_dir, first_step=0 if resumed is None else resumed.step),
            )


def start_trackers(call: Call[Any], group: RankGroup, run_dir: Path, resumed: CheckpointMeta | None) -> Trackers | None:
    """Start the trackers of --log-to, on rank 0."""
    if group.rank != 0:
        return None
    config = {**asdict(call.config), **asdict(call.flags), **asdict(call.workload_flags)}
    run = TrackedRun(run_dir, call.config.workload, 0 if resumed is None else resumed.step, config)
    return open_trackers(call.config.log_to, run, report=group.log)


def make_agreement(call: Call[Any], group: RankGroup, largest: PipelinedMax) -> StopAgreement | None:
    """Make the agreement on stopping, by one reduction a step that no rank waits for."""
    if call.stop is None:
        return None
    reduce = largest if group.world_size > 1 else None
    return StopAgreement(call.stop, rank=group.rank, world_size=group.world_size, reduce=reduce)


def make_watchdog(call: Call[Any], group: RankGroup, run_dir: Path, recorder: Recorder) -> Watchdog:
    """Make the watchdog; on with several ranks, if a job script would start the run again, or with `--stall-after`."""
    after_s = call.config.stall_after
    on = group.world_size > 1 or call.stop is not None or after_s is not None
    return Watchdog(group, run_dir, recorder.meter, after_s=after_s, on=on)


def log_topology(group: RankGroup) -> None:
    """Every rank logs its host, device and cores; rank 0 warns of hosts with more threads than cores."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    print(
        f"rank {group.rank} of {group.world_size} on {group.hosts[group.rank]}: {group.device}, "
        f"{threads} threads on {len(cores)} cores ({format_cores(cores)})",
        flush=True,
    )
    gathered = cast(list[tuple[int, set[int]]], group.gather((threads, cores)))
    for line in describe_shared_cores(group.hosts, gathered):
        group.log(line)


def set_numerics(config: Config, workload: Workload) -> None:
    """One switch for all fp32 products: torch's own default is full precision for matrices, TF32 for convolutions."""
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = workload.convolutions and not config.deterministic
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without one cuBLAS may sum in another order
        torch.use_deterministic_algorithms(True)


def warn_of_small_share(group: RankGroup, plan: TrainingPlan) -> None:
    """Warn if steps are smaller than requested: the run then measures another batch size."""
    share = -(-plan.epoch_samples // plan.world_size)
    if share < plan.samples_per_step:
        group.log(
            f"warning: a rank's share of an epoch is {share} of {plan.epoch_samples:,} samples, less than the "
            f"{plan.samples_per_step} of its step: every step takes {share}. Hint: a smaller --batch-size, or more data"
        )


def refuse_unequal_data(group: RankGroup, workload: Workload) -> None:
    """Raise UnequalData if ranks count different samples: they would end an epoch at different steps, and hang."""
    mine = (workload.train_length, 0 if workload.held_out is None else len(workload.held_out))
    gathered = group.gather(mine)
    for rank, counts in enumerate(gathered):
        if counts != gathered[0]:
            raise UnequalData(
                f"rank 0 on {group.hosts[0]} has {gathered[0]} training and held-out samples, "
                f"rank {rank} on {group.hosts[rank]} has {counts}",
                hint="is the data on every host the same version, or on a shared file system?",
            )


def choose_run_dir(call: Call[Any], group: RankGroup) -> Path:
    """Return the job's run folder, --run-dir, or a new folder named by rank 0, in this order."""
    given, requested = os.environ.get("HPCJOBS_RUN_DIR"), call.config.run_dir
    if given is not None and requested is not None and Path(given) != Path(requested):
        raise UsageError(f"--run-dir {requested}, but the job's run folder is {given}", hint="leave it out")
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    run_dir = Path(group.from_first(given or requested or f"runs/{call.trainer}-{stamp}"))
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def describe_run(trainer: str, workload: Workload, plan: TrainingPlan, stepper: Stepper, run_dir: Path) -> str:
    length = workload.train_length
    samples = "a stream of samples" if length is None else f"{length:,} samples"
    return (
        f"{trainer}: {workload.name}, {stepper.parameters:,} parameters, {samples}, "
        f"batch {plan.batch_size} × {plan.accumulate} × {plan.world_size} ranks, "
        f"{plan.total_steps} steps, lr {plan.lr:g}, run folder {run_dir}"
    )


def describe_result(summary: RunSummary, run_dir: Path) -> str:
    assert summary.throughput is not None
    assert summary.elapsed_s is not None
    used = "" if summary.mfu is None else f", {100 * summary.mfu:.1f} % of the stated peak"
    if summary.device == "cuda" and summary.peak_flops_per_s is None:
        used = f", no MFU: no peak is stated for {summary.device_name} in {summary.precision}"
    return (
        f"done: {summary.steps} steps in {summary.elapsed_s:.1f} s, "
        f"{summary.throughput.value:,.0f} {summary.throughput.unit} on {summary.world_size} ranks{used}; "
        f"{run_dir / SUMMARY}"
    )
