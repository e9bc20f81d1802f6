"""A training run from top to bottom: the world, the workload, the loop, the summary."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import torch

from hpcjobs.runtime.exits import UnequalData, UsageError
from hpcjobs.runtime.summary import Quantiles, RunSummary
from hpcjobs.trainers.core.checkpoints import Checkpoints, take_up
from hpcjobs.trainers.core.config import Config
from hpcjobs.trainers.core.cores import crowded, written
from hpcjobs.trainers.core.data import EpochOrder, Loader
from hpcjobs.trainers.core.evaluate import evaluate
from hpcjobs.trainers.core.group import Group, joined
from hpcjobs.trainers.core.launch import Call
from hpcjobs.trainers.core.monitor import Monitor
from hpcjobs.trainers.core.plan import Plan, plan_training
from hpcjobs.trainers.core.probe import Probe
from hpcjobs.trainers.core.record import Recorder
from hpcjobs.trainers.core.stage import staged
from hpcjobs.trainers.core.step import Stepper
from hpcjobs.trainers.strategies.base import Strategy
from hpcjobs.trainers.workloads import load_workload
from hpcjobs.trainers.workloads.base import Workload


def train(call: Call[Any], strategy: Strategy) -> RunSummary:
    """One rank's part of a run. Errors come out as TrainerError, with one rank elected to tell them."""
    config = call.config
    with joined(call.env, device=config.device, timeout_s=config.rendezvous_timeout_s) as group:
        introduce(group)
        set_numerics(config)
        workload = load_workload(staged(config, group))
        refuse_unequal_data(group, workload)
        plan = plan_training(config, workload, group.world_size)
        run_dir = settle_run_dir(call, group)
        stepper = Stepper(config, workload, strategy, group=group, plan=plan)
        group.say(opening(call.trainer, workload, plan, stepper, run_dir))
        resumed = take_up(config, stepper, run_dir, plan=plan, group=group)
        with (
            Recorder(group, plan, workload, run_dir, resumed=resumed) as recorder,
            Checkpoints(config, run_dir, stepper, recorder, plan=plan, group=group) as checkpoints,
            Monitor(group, run_dir, on=config.monitor) as monitor,
        ):
            first_step = 0 if resumed is None else resumed.step
            probe = Probe(config.probe_every if config.probe else None, stepper, group)
            run_loop(
                config, stepper, recorder, workload, checkpoints, probe, plan=plan, group=group, first_step=first_step
            )
            checkpoints.finish()
            traffic = strategy.traffic(stepper.model) if group.world_size > 1 else None
            summary = recorder.finish(
                steps=plan.total_steps,
                resumed_from_step=None if resumed is None else resumed.step,
                exposed_communication_s=Quantiles.of(probe.exposed_s),
                checkpoint_stall_s=Quantiles.of(checkpoints.stall_s),
                trainer=call.trainer,
                strategy=strategy.name,
                monitor=monitor.summary(),
                backend=strategy.backend or group.backend,
                job_id=os.environ.get("HPCJOBS_JOB_ID"),
                precision=config.precision,
                tf32=config.tf32,
                parameters=stepper.parameters,
                bytes_moved_per_step=None if traffic is None else traffic.bytes,
                collectives_per_step=None if traffic is None else traffic.calls,
                config={**asdict(config), **asdict(call.flags)},
            )
        group.say(closing(summary, run_dir))
    return summary


def run_loop(
    config: Config,
    stepper: Stepper,
    recorder: Recorder,
    workload: Workload,
    checkpoints: Checkpoints,
    probe: Probe,
    *,
    plan: Plan,
    group: Group,
    first_step: int,
) -> None:
    """Every step of every epoch, a line every so many, and the held-out part after each epoch."""
    loader = Loader(workload.train, device=group.device, workers=config.workers)
    meter, step = recorder.meter, first_step
    # the epoch of the last finished step: its evaluation may not have been reached
    for epoch in range(max(0, first_step - 1) // plan.steps_per_epoch, plan.epochs):
        order = EpochOrder(
            len(workload.train),
            group.rank,
            group.world_size,
            plan.samples_per_step,
            config.seed,
            epoch,
            first_step=step - epoch * plan.steps_per_epoch,
            fill=stepper.strategy.fills,
        )
        batches = loader.epoch(order)
        for _ in range(min(len(order), plan.total_steps - step)):
            meter.begin()
            batch = next(batches, None)  # none: this rank has run out, a step before others
            meter.data_ready()
            loss = None if batch is None else stepper.step(batch, step)
            if loss is None or (not stepper.strategy.fills and step + 1 == (epoch + 1) * plan.steps_per_epoch):
                loss = stepper.strategy.join(stepper.model, loss)
            meter.end()
            recorder.add(loss)
            step += 1
            if step % config.log_every == 0 or checkpoints.due(step):
                recorder.flush(step, epoch)
            if batch is not None and probe.due(step):
                probe.measure(batch)
            if checkpoints.due(step):
                checkpoints.save(step, epoch)
        recorder.flush(step, epoch)
        if workload.held_out is not None:
            result = evaluate(stepper.forward, workload, workload.held_out, group=group, batch_size=plan.batch_size)
            recorder.evaluated(result, step, epoch)


def introduce(group: Group) -> None:
    """Every rank says where it runs; a reader of the log sees the whole world, and where it is too crowded."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    print(
        f"rank {group.rank} of {group.world_size} on {group.hosts[group.rank]}: {group.device}, "
        f"{threads} threads on {len(cores)} cores ({written(cores)})",
        flush=True,
    )
    everyone = cast(list[tuple[int, set[int]]], group.gather((threads, cores)))
    for line in crowded(group.hosts, everyone):
        group.say(line)


def set_numerics(config: Config) -> None:
    if config.tf32:
        torch.set_float32_matmul_precision("high")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def refuse_unequal_data(group: Group, workload: Workload) -> None:
    """Ranks that count different samples would end an epoch at different steps, and hang there."""
    mine = (len(workload.train), 0 if workload.held_out is None else len(workload.held_out))
    everyone = group.gather(mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise UnequalData(
                f"rank 0 on {group.hosts[0]} has {everyone[0]} training and held-out samples, "
                f"rank {rank} on {group.hosts[rank]} has {theirs}",
                hint="is the data on every host the same version, or on a shared file system?",
            )


def settle_run_dir(call: Call[Any], group: Group) -> Path:
    """The job's run folder; by hand --run-dir; else one made once, named by rank 0."""
    given, asked = os.environ.get("HPCJOBS_RUN_DIR"), call.config.run_dir
    if given is not None and asked is not None and Path(given) != Path(asked):
        raise UsageError(f"--run-dir {asked}, but the job's run folder is {given}", hint="leave it out")
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    run_dir = Path(group.from_first(given or asked or f"runs/{call.trainer}-{stamp}"))
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def opening(trainer: str, workload: Workload, plan: Plan, stepper: Stepper, run_dir: Path) -> str:
    return (
        f"{trainer}: {workload.name}, {stepper.parameters:,} parameters, {len(workload.train):,} samples, "
        f"batch {plan.batch_size} × {plan.accumulate} × {plan.world_size} ranks, "
        f"{plan.total_steps} steps, lr {plan.lr:g}, run folder {run_dir}"
    )


def closing(summary: RunSummary, run_dir: Path) -> str:
    assert summary.throughput is not None
    assert summary.elapsed_s is not None
    used = "" if summary.mfu is None else f", {100 * summary.mfu:.1f} % of the stated peak"
    return (
        f"done: {summary.steps} steps in {summary.elapsed_s:.1f} s, "
        f"{summary.throughput.value:,.0f} {summary.throughput.unit} on {summary.world_size} ranks{used}; "
        f"{run_dir / 'summary.json'}"
    )
