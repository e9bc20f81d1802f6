"""Models written as in public sources train, save, resume and are exported under every strategy, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcjobs.trainers.checkpoint.export import ExportFlags, export

from ..conftest import Runs, World, worlds_path
from ..fsdp_here import needs_fsdp, runnable

MODELS = ("llama", "tied", "unused", "normed", "clip")
STRATEGIES = runnable(
    ("ddp", "fsdp_scratch", "fsdp", "ddp_scratch", "lightning fsdp", "lightning", "ddp", "fsdp_scratch")
)
FEW = 3


def flags_of(model: str, steps: int) -> tuple[str, ...]:
    flags = ("--workload", f"foreign:{model}", "--steps", str(steps), "--log-every", "1", "--batch-size", "8")
    return (*flags, "--checkpoint-every", str(FEW), "--no-probe", "--clip-norm", "1", "--checkpoint-keep", "20")


def unused_in_ddp(model: str, strategy: str) -> tuple[str, ...]:
    """DDP has to be told of weights that no pass uses."""
    return ("--find-unused-parameters",) if (model, strategy) == ("unused", "ddp") else ()


def strategies_of(model: str) -> tuple[str, ...]:
    shardless = [name for name in STRATEGIES if model != "clip" or name not in ("fsdp", "lightning fsdp")]
    return tuple(name for name in shardless if model != "unused" or name != "lightning")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of each model one run of ddp alone, and one that changes its strategy at every checkpoint."""
    runs = Runs(tmp_path_factory.mktemp("foreign"), 2)
    plan: list[tuple[str, str, tuple[str, ...]]] = []
    for model in MODELS:
        chain = strategies_of(model)
        plan.append((model, "ddp", (*unused_in_ddp(model, "ddp"), *flags_of(model, FEW * len(chain)))))
        for number, name in enumerate(chain):
            trainer, *sharded = name.split()
            own = (*(("--strategy", "fsdp") if sharded else ()), *unused_in_ddp(model, trainer))
            plan.append((f"{model} chain", trainer, (*own, *flags_of(model, FEW * (number + 1)))))
    runs.run(*plan)
    return runs


@pytest.mark.parametrize("model", MODELS)
def test_a_foreign_model_has_the_losses_of_ddp_though_its_strategy_changes_at_every_checkpoint(
    model: str, two: Runs
) -> None:
    alone, chained = two[model], two[f"{model} chain"]
    assert chained.summary.resumed_from_step == FEW * (len(strategies_of(model)) - 1)
    assert chained.losses() == pytest.approx(alone.losses(), rel=2e-4)
    norms = [[line["metrics"] for line in run.lines("step")] for run in (chained, alone)]
    assert norms[0] == [pytest.approx(values, rel=2e-3) for values in norms[1]]


@pytest.mark.parametrize("model", MODELS)
def test_the_weights_of_a_foreign_model_are_exported_alike(model: str, two: Runs, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = []
    for number, name in enumerate((model, f"{model} chain")):
        path = tmp_path / f"{number}.safetensors"
        assert "tensors" in export(ExportFlags(out=str(path)), two.root / name)
        tensors.append(safetensors.load_file(path))
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        if "pooler" not in name and "classifier" not in name and "num_batches" not in name:
            assert tensors[1][name].float().numpy() == pytest.approx(tensor.float().numpy(), rel=1e-2, abs=1e-4), name


@needs_fsdp
def test_fsdp_refuses_a_parameter_without_a_dimension_by_its_name(world: World) -> None:
    ended = world(1, "fsdp", *flags_of("clip", 3), env={"PYTHONPATH": worlds_path()})
    assert ended.codes == [2], ended.err
    (line,) = ended.complaints
    assert "fsdp: logit_scale is a parameter without a dimension" in line
    assert "use fsdp_scratch or ddp" in line
