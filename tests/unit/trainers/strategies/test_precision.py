"""Equal losses over strategies in fp32, bf16 and fp16, of a model with frozen and with unused weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ..conftest import Runs
from ..fsdp_here import runnable, strategies

STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("ddp", "--find-unused-parameters"),
    "ddp_scratch": ("ddp_scratch", "--bucket-cap-mb", "0.001"),
    "fsdp": ("fsdp",),
    "fsdp_scratch": ("fsdp_scratch",),
    "fsdp_scratch, computed again": ("fsdp_scratch", "--activation-checkpointing"),
    "lightning fsdp": ("lightning", "--strategy", "fsdp"),
}
TOLERANCE = {"fp32": 2e-4, "bf16": 3e-2, "fp16": 1e-2}
COMMON = ("--log-every", "1", "--steps", "12", "--seed", "3")


@dataclass(frozen=True)
class Table:
    runs: Runs

    def losses(self, workload: str, strategy: str, precision: str) -> list[object]:
        return self.runs[f"{workload} {strategy} {precision}"].losses()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    runs = Runs(tmp_path_factory.mktemp("precision"), 2)
    cells = [("partly", strategy, precision) for strategy in runnable(STRATEGIES) for precision in TOLERANCE]
    cells += [("loud", strategy, "fp16") for strategy in runnable(STRATEGIES)]
    cells += [("branching", strategy, "fp32") for strategy in ("ddp", "ddp_scratch", "fsdp_scratch")]
    kinds = []
    for workload, strategy, precision in cells:
        trainer, *flags = STRATEGIES[strategy]
        more = ("--workload", f"worlds:{workload}", "--precision", precision, *COMMON)
        saves = ("--checkpoint-every", "12") if workload == "loud" else ()
        kinds.append((f"{workload} {strategy} {precision}", trainer, (*flags, *more, *saves)))
    runs.run(*kinds)
    return Table(runs)


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("strategy", strategies(STRATEGIES))
def test_frozen_and_unused_weights_leave_the_losses_alike(table: Table, strategy: str, precision: str) -> None:
    mine, full = table.losses("partly", strategy, precision), table.losses("partly", "ddp", "fp32")
    assert len(mine) == 12
    assert mine == pytest.approx(full, rel=TOLERANCE[precision])
    assert precision == "fp32" or mine != full


@pytest.mark.parametrize("strategy", strategies(STRATEGIES))
def test_where_gradients_overflow_in_fp16_all_ranks_skip_the_same_steps(table: Table, strategy: str) -> None:
    """Otherwise the shards of a model are of different steps, and its losses are no longer those of ddp."""
    mine, ddp = table.losses("loud", strategy, "fp16"), table.losses("loud", "ddp", "fp16")
    assert mine == pytest.approx(ddp, rel=1e-3)  # 7e-3 where each rank judges its own shard
    state = torch.load(table.runs[f"loud {strategy} fp16"].run_dir / "checkpoints/latest/state.pt")
    assert 1 < state["scaler"]["scale"] < 2**16


@pytest.mark.parametrize("strategy", ["ddp_scratch", "fsdp_scratch"])
def test_a_weight_that_only_one_rank_uses_moves_on_all(table: Table, strategy: str) -> None:
    ddp = table.losses("branching", "ddp", "fp32")
    assert table.losses("branching", strategy, "fp32") == pytest.approx(ddp, rel=2e-4)
