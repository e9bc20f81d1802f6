"""Optimizers, schedules, weight decay, the norm of the gradient and the average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcjobs.runtime.exits import UsageError
from hpcjobs.trainers.config import Config
from hpcjobs.trainers.optimization import (
    apply_optimizer_flags,
    averaged_weights,
    build_optimizer,
    plan_training,
    update_average,
)
from hpcjobs.trainers.workloads.base import group_parameters

from .. import worlds
from ..conftest import Runs
from ..fsdp_here import runnable

LM = ("--workload", "lm", "--preset", "tiny", "--sequence-length", "16", "--train-samples", "512", "--batch-size", "4")
EVERY_STEP = ("--log-every", "1", "--no-probe", "--steps", "8", "--eval-every", "4", "--eval-batches", "2")
RECIPE = (
    *("--betas", "0.8", "0.95", "--eps", "1e-6", "--weight-decay", "0.5", "--no-decay-norms", "--lr-schedule", "wsd"),
    *("--warmup-steps", "2", "--ema", "0.8", "--gradient-norm"),
)
NAMES = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch", "lightning ddp", "lightning fsdp")


def rates(*, steps: int = 10, warmup: int = 0, **flags: Any) -> list[float]:
    plan = plan_training(Config(steps=steps, lr=1.0, warmup_steps=warmup, **flags), worlds.points(Config()), 1)
    return [plan.lr_at(step) for step in range(steps)]


def test_every_schedule_begins_at_the_rate_and_ends_at_its_final_share() -> None:
    assert rates() == [1.0] * 10
    assert rates(lr_schedule="linear", lr_final=0.1) == pytest.approx([1 - 0.1 * step for step in range(10)])
    assert rates(lr_schedule="wsd", lr_final=0.0) == pytest.approx([1.0] * 8 + [0.5, 0.0])
    cosine = rates(lr_schedule="cosine", lr_final=0.2, steps=11)
    assert (cosine[0], cosine[5], cosine[10]) == pytest.approx((1.0, 0.6, 0.2))
    warmed = rates(lr_schedule="linear", lr_final=0.0, steps=8, warmup=4)
    assert warmed == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 2 / 3, 1 / 3, 0.0])


def test_norms_and_biases_may_be_spared_weight_decay() -> None:
    config = Config(weight_decay=0.3, decay_norms=False, betas=(0.8, 0.9), eps=1e-5)
    workload = apply_optimizer_flags(config, worlds.points(config))
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    optimizer = build_optimizer(group_parameters(model.named_parameters(), workload), workload, config, lr=0.1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0, 0.3, 0.0]
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-5


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ({"momentum": 0.5}, "--momentum is of --optimizer sgd, and this run has adamw"),
        ({"optimizer": "sgd", "eps": 1e-3}, "--eps is of --optimizer adamw, and this run has sgd"),
        ({"betas": (0.9,)}, "--betas 0.9: two numbers"),
        ({"betas": (0.9, 1.0)}, "--betas 0.9 1.0: two numbers"),
        ({"ema": 1.5}, "--ema 1.5: a decay is less than 1"),
    ],
)
def test_a_flag_of_another_optimizer_is_refused(flags: dict[str, Any], arguments: str) -> None:
    with pytest.raises(UsageError, match=arguments):
        apply_optimizer_flags(Config(**flags), worlds.points(Config()))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_average_of_the_weights_follows_them_and_changes_places_with_them(kind: Any) -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = kind([weight], lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    expected: torch.Tensor | None = None
    for _ in range(4):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        update_average(optimizer, 0.75)
        now = weight.detach().clone()
        expected = now if expected is None else 0.75 * expected + 0.25 * now
    assert expected is not None
    with averaged_weights(optimizer):
        assert weight.tolist() == pytest.approx(expected.tolist())
        with averaged_weights(optimizer):  # a checkpoint within an evaluation
            assert weight.tolist() == now.tolist()
        assert weight.tolist() == pytest.approx(expected.tolist())
    assert weight.tolist() == now.tolist()


def test_a_recipe_gives_equal_losses_norms_and_averaged_weights_under_every_strategy(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 2)
    kinds: list[tuple[str, str, tuple[str, ...]]] = [("plain", "ddp", (*LM, *EVERY_STEP, *RECIPE[:-3]))]
    for name in runnable(NAMES):
        trainer, strategy = name.split()[0], name.split()[1:]
        kinds.append((name, trainer, (*(("--strategy", *strategy) if strategy else ()), *LM, *EVERY_STEP, *RECIPE)))
    chain = runnable(("fsdp_scratch", "fsdp", "ddp"))
    for number, name in enumerate(chain, 1):  # the schedule is of all steps: it is the same in each part
        stop = str(8 if number == len(chain) else 3 * number)
        saving = ("--checkpoint-every", "1", "--checkpoint-keep", "20")
        kinds.append(
            ("chain", name, (*LM, *EVERY_STEP, *RECIPE, "--lr-schedule", "constant", *saving, "--steps", stop))
        )
    kinds.append(("unbroken", "ddp", (*LM, *EVERY_STEP, *RECIPE, "--lr-schedule", "constant")))
    runs.run(*kinds)

    reference = runs["ddp"]
    norms = [line["metrics"] for line in reference.lines("step")]
    assert len(norms) == 8
    evaluations = [line["loss"] for line in reference.lines("evaluation")]
    for name in runnable(NAMES):
        assert runs[name].losses() == pytest.approx(reference.losses(), rel=2e-4), name
        assert [line["metrics"] for line in runs[name].lines("step")] == [pytest.approx(n, rel=1e-3) for n in norms]
        assert [line["loss"] for line in runs[name].lines("evaluation")] == pytest.approx(evaluations, rel=2e-4), name
    assert reference.losses() == runs["plain"].losses()  # evaluating the average leaves training alone
    assert evaluations != pytest.approx([line["loss"] for line in runs["plain"].lines("evaluation")], rel=1e-5)
    assert runs["chain"].losses() == pytest.approx(runs["unbroken"].losses(), rel=2e-4)
    final = [run.lines("evaluation")[-1]["loss"] for run in (runs["chain"], runs["unbroken"])]
    assert final[0] == pytest.approx(final[1], rel=2e-4)
