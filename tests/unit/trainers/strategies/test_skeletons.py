"""Models that fsdp builds without memory, and shards before they have weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpcjobs.trainers.config import Config
from hpcjobs.trainers.strategies import find_blocks
from hpcjobs.trainers.workloads import load_workload

from ..conftest import Runs, World, worlds_path
from ..fsdp_here import needs_fsdp
from ..worlds import PartBlock, PartNet, TiedNet

FLAGS = ("--log-every", "1", "--steps", "12", "--lr", "0.01")


@needs_fsdp
def test_losses_are_exactly_those_of_a_model_that_every_rank_builds_completely(two_ranks: Runs) -> None:
    runs = [(name, "fsdp", ("--workload", f"worlds:{name}", *FLAGS)) for name in ("tied", "tied_by_value")]
    two_ranks.run(*runs)
    assert two_ranks["tied"].losses() == two_ranks["tied_by_value"].losses()
    assert len(two_ranks["tied"].losses()) == 12


@needs_fsdp
def test_rank_0_alone_ever_has_the_complete_weights(world: World) -> None:
    env = {"PYTHONPATH": worlds_path()}
    ended = world(2, "fsdp", "--workload", "worlds:tied", *FLAGS, "--no-probe", env=env)
    assert (ended.codes, ended.complaints) == ([0, 0], [])
    built = [(ended.run_dir.parent / f"built-{rank}.txt").read_text().split() for rank in (0, 1)]
    assert built == [["meta", "cpu"], ["meta"]]


@needs_fsdp
def test_a_model_that_reads_values_as_it_is_built_is_built_completely_and_the_log_says_why(world: World) -> None:
    env = {"PYTHONPATH": worlds_path()}
    ended = world(1, "fsdp", "--workload", "worlds:tied_by_value", *FLAGS, env=env)
    assert ended.codes == [0]
    assert "each rank builds the complete model, which the meta device cannot have: " in ended.out[0]
    assert "blocks: PartBlock, which repeats" in ended.out[0]


@pytest.mark.parametrize(
    ("build", "blocks"),
    [
        (PartNet, ("PartBlock",)),
        (TiedNet, ("PartBlock",)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), ()),
        (lambda: nn.Sequential(PartBlock(4)), ()),
        (lambda: nn.Sequential(nn.Linear(64, 64), PartBlock(2), PartBlock(2)), ()),
        (load_workload(Config(workload="lm")).build_model, ("Block",)),
        (load_workload(Config(workload="resnet50")).build_model, ("Bottleneck",)),
        (lambda: nn.Transformer(16, 2, 2, 2, 32, batch_first=True), ("TransformerDecoderLayer",)),
    ],
)
def test_blocks_are_the_class_that_repeats_and_holds_most_weights(
    build: Callable[[], nn.Module], blocks: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        assert tuple(kind.__name__ for kind in find_blocks(build())) == blocks
