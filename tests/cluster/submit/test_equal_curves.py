"""The same seed and global batch give the same losses: every strategy, several hosts, both launchers.

Only the order of additions differs between them; in bf16 also where values are rounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from login_node import Cluster, Submitted

TOLERANCES = {
    ("lm", "fp32"): (2e-4, 50),
    ("mnist", "fp32"): (2e-3, 50),
    ("lm", "bf16"): (3e-2, 50),
    ("mnist", "bf16"): (1.5e-1, 20),
}
"""By workload and precision: largest relative difference of a step's loss, and over how many steps. In bf16 the losses
of mnist's batches of 16 part further from those in fp32 as they fall."""
STRATEGIES = {
    "ddp": ("ddp",),
    "ddp_scratch": ("ddp_scratch",),
    "fsdp": ("fsdp",),
    "fsdp_scratch": ("fsdp_scratch",),
    "lightning ddp": ("lightning", "--strategy", "ddp"),
    "lightning fsdp": ("lightning", "--strategy", "fsdp"),
}
FLAGS = {
    "lm": ("--workload", "lm", "--sequence-length", "32", "--train-samples", "1024"),
    "mnist": ("--workload", "mnist"),
}
GLOBAL_BATCH = 16
SEVERAL = Path(__file__).parents[2] / "several.py"


class World(NamedTuple):
    """One job that trains by all strategies, one after the other."""

    job: Submitted
    folder: Path

    def losses(self, run: str) -> list[float]:
        lines = map(json.loads, (self.folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]


def started(
    cluster: Cluster, ranks: int, kinds: Iterable[tuple[str, str]], *, steps: int, launcher: str = "srun"
) -> World:
    """A host for each rank; `kinds` are workloads and precisions."""
    folder = cluster.folder / f"{launcher}-{ranks}"
    runs = []
    for workload, precision in kinds:
        for name, (trainer, *flags) in STRATEGIES.items():
            run = folder / f"{name} {workload} {precision}"
            run.mkdir(parents=True)
            settings = ("--precision", precision, "--batch-size", str(GLOBAL_BATCH // ranks), "--steps", str(steps))
            common = ("--log-every", "1", "--clip-norm", "1", "--no-probe")
            runs.append(
                {"folder": str(run), "trainer": trainer, "flags": [*flags, *FLAGS[workload], *settings, *common]}
            )
    plan = folder / "plan.json"
    plan.write_text(json.dumps(runs), encoding="utf-8")
    layout = ("-N", str(ranks), "--ntasks-per-node", "1", "-c", "1", "--launcher", launcher)
    return World(cluster.submit(*layout, str(SEVERAL), str(plan)), folder)


def compared(worlds: Iterable[World], kind: tuple[str, str], reference: World, *, steps: int) -> None:
    """Each curve against that of one process under ddp in fp32; prints the largest difference."""
    (workload, precision), (tolerance, reach) = kind, TOLERANCES[kind]
    expected, furthest = reference.losses(f"ddp {workload} fp32"), 0.0
    assert len(expected) == steps
    for world in worlds:
        for name in STRATEGIES:
            curve = world.losses(f"{name} {workload} {precision}")
            assert len(curve) == steps
            apart = max(abs(a - b) / b for a, b in zip(curve[:reach], expected[:reach], strict=True))
            assert apart < tolerance, (world.folder.name, name, kind)
            furthest = max(furthest, apart)
    print(f"{workload} {precision}: every strategy within {furthest:.1e}")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_strategies_on_four_hosts_have_the_losses_of_one_process(cluster: Cluster) -> None:
    kind = ("lm", "fp32")
    one, four = (started(cluster, ranks, [kind], steps=20) for ranks in (1, 4))
    for world in (one, four):
        assert world.job.wait(timeout_s=500).code == 0, world.job.log
    compared([one, four], kind, one, steps=20)
    assert "Lightning's environment: SLURMEnvironment" in four.job.log


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("workload", ["lm", "mnist"])
def test_fifty_steps_on_one_two_and_four_hosts_under_both_launchers(cluster: Cluster, workload: str) -> None:
    kinds = [kind for kind in TOLERANCES if kind[0] == workload]
    worlds = []
    for ranks, launcher in ((1, "srun"), (2, "srun"), (4, "srun"), (4, "torchrun")):
        world = started(cluster, ranks, kinds, steps=50, launcher=launcher)
        assert world.job.wait(timeout_s=1200).code == 0, world.job.log
        worlds.append(world)
    for kind in kinds:
        compared(worlds, kind, worlds[0], steps=50)
    assert "Lightning's environment: SLURMEnvironment" in worlds[2].job.log
    assert "Lightning's environment: LauncherEnvironment" in worlds[3].job.log
