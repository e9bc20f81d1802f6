"""Training from top to bottom: the world, the workload and the record are opened, and closed into a summary.

`train` makes every step of every epoch. `Evaluator` evaluates the held-out part: each sample counts once, whatever the
number of ranks. `Checkpoints` decides when to save. The ranks' requests to stop are combined.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from hpcjobs.record import SUMMARY
from hpcjobs.record.summary import Evaluation, Quantiles, RunSummary
from hpcjobs.runtime import checkpoints, signals
from hpcjobs.runtime.checkpoint_writer import CheckpointKeeper
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import LossNotFinite, Requeue, StorageFault, UnequalData, UsageError, print_error
from hpcjobs.runtime.signals import JobControl, StopAgreement
from hpcjobs.runtime.step_log import Trackers, open_trackers, require_trackers
from hpcjobs.runtime.watchdog import Watchdog
from hpcjobs.trackers import TrackedRun
from hpcjobs.trainers import checkpoint as states
from hpcjobs.trainers.checkpoint import CheckpointWriter, WriterGroup
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.data import HeldOutOrder, Loader, TrainingData, adapt_datasets, resolve_workers
from hpcjobs.trainers.data.staging import stage_data
from hpcjobs.trainers.distributed import RankGroup, describe_shared_cores, format_cores, join_world
from hpcjobs.trainers.launch import Call, collect_new_objects
from hpcjobs.trainers.metrics import Monitor, Recorder
from hpcjobs.trainers.optimization import Stepper, TrainingPlan, grow_synthetic, plan_training
from hpcjobs.trainers.profiler import Probe, StepProfiler, record_memory
from hpcjobs.trainers.strategies import Strategy
from hpcjobs.trainers.workloads import load_workload
from hpcjobs.trainers.workloads.base import Batch, Score, Workload, count_samples, split_loss


class PipelinedMax:
    """The maximum over all ranks, one call late: a call returns the result of the call before, so no rank waits."""

    def __init__(self) -> None:
        self._largest = torch.zeros((), dtype=torch.int32)
        self._reduction: dist.Work | None = None

    def __call__(self, mine: int) -> int:
        self.close()
        largest = int(self._largest)
        self._largest.fill_(mine)
        self._reduction = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, async_op=True)
        return largest

    def close(self) -> None:
        """Wait for the newest call."""
        if self._reduction is not None:
            self._reduction.wait()


def resume_run(
    config: Config, stepper: Stepper, run_dir: Path, *, plan: TrainingPlan, group: RankGroup
) -> CheckpointMeta | None:
    """Load the checkpoint that `--resume` names. Returns its metadata; None without one."""
    place = states.choose(config.resume, run_dir, group)
    if place is None:
        return None
    strategy = stepper.strategy
    meta, state = states.read(place, lambda where: strategy.allocate_shard(stepper.model, stepper.optimizer, where))
    states.restore(state, stepper, group)
    group.log(f"resumed from {place} at step {meta.step}{states.changes(meta, plan)}")
    elsewhere = place.parent.parent != run_dir.resolve()  # another run's metrics are not this one's
    return replace(meta, metrics_bytes=0 if elsewhere else meta.metrics_bytes)


class Checkpoints(CheckpointKeeper):
    """Saves every `--checkpoint-every` steps or `--save-every-epochs` epochs, and at the end; without these, never."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stepper: Stepper,
        recorder: Recorder,
        control: JobControl,
        *,
        plan: TrainingPlan,
        group: RankGroup,
    ) -> None:
        self.every, self.plan, self.group = config.checkpoint_every, plan, group
        self.every_epochs = config.save_every_epochs
        self.stepper, self.recorder = stepper, recorder
        in_parts = stepper.strategy.in_parts
        self._writes = in_parts or group.rank == 0
        writer = CheckpointWriter(
            run_dir / checkpoints.FOLDER,
            keep=config.checkpoint_keep,
            background=config.checkpoint_async,
            on_written=control.record_saved_step,
            together=WriterGroup(group.aside(), int(group.from_first(str(os.getpid())))) if in_parts else None,
            first=group.rank == 0,
            agree=group.agree if in_parts else lambda mine: mine,
        )
        super().__init__(writer, control, record=recorder.record_checkpoint, step_s=lambda: recorder.meter.recent_steps)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if isinstance(error[1], LossNotFinite):  # raised on all ranks; earlier checkpoints are sound
                self.finish()
        except StorageFault as fault:
            print_error(f"warning: {fault}")
        finally:
            self.close()

    def due(self, step: int) -> bool:
        if self.every is None and self.every_epochs is None:
            return False
        of_steps = self.every is not None and step % self.every == 0
        of_epochs = self.every_epochs is not None and self.plan.ends_epoch(step, every=self.every_epochs)
        return step == self.plan.total_steps or of_steps or of_epochs

    def save(self, step: int, epoch: int, *, blocking: bool = False) -> None:
        """Save the state; a collective call. If rank 0 can't write, it prints why, and tries again at a later save.

        If ranks hold parts of the state, each writes its parts. `blocking`: the last save of this attempt, on disk
        before this returns; StorageFault on rank 0 if the storage does not take it in time.
        """
        with self.stepper.trained_weights():
            states.refuse_nan(self.stepper, self.group, step=step)
            state = states.capture(self.stepper, self.group)
            if self._writes:
                self.write(self._meta(step, epoch), state, last=step == self.plan.total_steps, blocking=blocking)

    def _meta(self, step: int, epoch: int) -> CheckpointMeta:
        evaluation = self.recorder.evaluation_at(step)
        return CheckpointMeta(
            step=step,
            epoch=epoch,
            epoch_samples=self.plan.samples_of_epoch(epoch, step),
            world_size=self.group.world_size,
            metrics_bytes=self.recorder.metrics_bytes_at(step),
            loss=None if evaluation is None else evaluation.loss,
        )


TENSOR = ""  # the key of the score's tensor, among the names of metrics


class Evaluator:
    """When the held-out part is evaluated, and how: in the precision and by the loader settings of training."""

    def __init__(
        self, config: Config, workload: Workload, stepper: Stepper, *, plan: TrainingPlan, group: RankGroup
    ) -> None:
        self.workload, self.stepper, self.plan, self.group = workload, stepper, plan, group
        held_out = workload.held_out
        self.on, self.every = held_out is not None and config.eval_every != 0, config.eval_every
        if held_out is None or not self.on:
            return
        if len(held_out) == 0:
            raise UsageError(
                f"held_out of the workload {workload.name} has no samples",
                hint="held_out=None, or --eval-every 0, trains without evaluation",
            )
        self._order = HeldOutOrder(
            len(held_out), group.rank, group.world_size, plan.batch_size, config.seed, config.eval_batches
        )
        self._loader = Loader(held_out, device=group.device, workers=config.workers or 0)

    def due(self, step: int) -> bool:
        """Whether to evaluate now: after every `every` steps or every epoch, and after the last step."""
        if not self.on or step == 0:
            return False
        regular = self.plan.ends_epoch(step) if self.every is None else step % self.every == 0
        return regular or step == self.plan.total_steps

    def evaluate(self, boundary: Callable[[], None]) -> Evaluation:
        """Scores the model; a collective call. `boundary` is called after each pass, and may end it by an exception."""
        model, group = self.stepper.forward, self.group
        sums: dict[str, torch.Tensor] = {}
        model.eval()
        with torch.no_grad(), self.stepper.weights_to_evaluate():
            for number, batch in enumerate(self._loader.epoch(self._order)):
                with self.stepper.autocast():
                    score = self._score(model, batch)
                counts = bool(self._order.batch(number))
                for name, value in {TENSOR: score.tensor, **score.metrics}.items():
                    sums[name] = sums.get(name, 0) + counts * value.double()
                boundary()
        model.train()
        names = [name for name in sums if name != TENSOR]
        flat = torch.cat([sums[TENSOR], *(sums[name].reshape(1) for name in names)])
        loss_sum, correct, count, *totals = group.sum(flat).tolist()
        loss = loss_sum / count
        accuracy = None if math.isnan(correct) else correct / count
        perplexity = math.exp(min(loss, 700.0)) if self.workload.perplexity else None
        metrics = {name: total / count for name, total in zip(names, totals, strict=True)}
        return Evaluation(loss, accuracy, int(count), perplexity, metrics)

    def _score(self, model: nn.Module, batch: Batch) -> Score:
        """Return the workload's score, or a score from its loss and metrics, which are means over the batch."""
        if self.workload.evaluate is not None:
            return self.workload.evaluate(model, batch)
        samples = count_samples(batch)
        loss, metrics = split_loss(self.workload.loss(model, batch), self.workload)
        loss = loss.double().reshape(())
        tensor = torch.stack([loss * samples, torch.full_like(loss, math.nan), torch.full_like(loss, samples)])
        return Score(tensor, {name: samples * value for name, value in metrics.items()})


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
            self.group.barrier()  # a launcher ends all ranks when the first one leaves: not before all have written
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
            epoch, _ = self.plan.locate(step - 1)  # of the last finished step
            self.evaluate(step, epoch)
            if self.resumed.loss is None and self.checkpoints.due(step):
                self.checkpoints.save(step, epoch)

    def _evaluating(self, step: int, epoch: int) -> None:
        self.watchdog.beat(step, "evaluation")
        self.stop_if_asked(step, epoch)

    def finish(self, *, exposed_s: Sequence[float], compute_s: Sequence[float]) -> RunSummary:
        """The summary, once the last checkpoint is on disk; a collective call.

        Raises LossNotFinite: the held-out loss of the trained model is NaN or infinite.
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
            call.env, device=config.device, timeout_s=config.rendezvous_timeout_s, stall_after_s=config.stall_after
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
    return Watchdog(group, run_dir, lambda: recorder.meter.recent_steps, after_s=after_s, on=on)


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


def train(call: Call[Any], strategy: Strategy) -> RunSummary:
    """One rank's part of a run."""
    with open_run(call, strategy) as run:
        probe = Probe(run.config.probe_every if run.config.probe else None, run.stepper, run.group)
        run.evaluate_resumed()
        run_loop(run, probe)
        return run.finish(exposed_s=probe.exposed_s, compute_s=probe.compute_s)


def run_loop(run: TrainingRun, probe: Probe) -> None:
    """Every step of every epoch; `end_step` writes lines, evaluates and saves where that is due."""
    plan, stepper, recorder = run.plan, run.stepper, run.recorder
    data = run.make_training_data()
    meter, step = recorder.meter, run.first_step
    for epoch in range(plan.locate(step)[0], plan.epochs):
        batches = data.epoch(epoch, plan.locate(step)[1])
        for _ in range(plan.last_step_of(epoch) - step):
            meter.begin()
            batch = next(batches, None)  # none: this rank has run out, a step before others
            meter.data_ready()
            run.watchdog.beat(step, "step")
            loss = None if batch is None else stepper.step(batch, step)
            if loss is None or (not stepper.strategy.fills and plan.ends_epoch(step + 1)):
                loss = stepper.strategy.join(stepper.model, loss)
            meter.end()
            recorder.add(loss, stepper.take_metrics())
            step += 1
            run.end_step(step, epoch)
            if batch is not None and probe.due(step):
                run.watchdog.beat(step, "probe")
                probe.measure(batch)
