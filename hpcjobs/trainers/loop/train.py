"""Training from top to bottom: every step of every epoch."""

from __future__ import annotations

from typing import Any

from hpcjobs.record.summary import RunSummary
from hpcjobs.trainers.commandline.launch import Call
from hpcjobs.trainers.loop.run import TrainingRun, open_run
from hpcjobs.trainers.metrics.communication_probe import Probe
from hpcjobs.trainers.strategies.base import Strategy


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
