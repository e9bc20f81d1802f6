"""Who Lightning thinks it is: by its own reading of Slurm, or by ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcjobs.runtime.dist import DistEnv
from hpcjobs.trainers.distributed import RankGroup

from ..conftest import Runs

SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NAME": "train",
}


def third_of_four() -> RankGroup:
    env = DistEnv(3, 1, 4, 2, 1, "c07", 23456, "torchrun")
    return RankGroup(env, ("c07", "c07", "c08", "c08"), torch.device("cpu"), "gloo")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_short_last_step_of_an_epoch_counts_its_passes_by_their_samples(ranks: int, tmp_path: Path) -> None:
    """Of 256 samples and three passes of 6 the last step has one pass of 4 (two ranks: of 2); metrics agree too."""
    runs = Runs(tmp_path, ranks)
    flags = ("--workload", "worlds:noisy_pairs", "--batch-size", str(12 // ranks), "--accumulate", "3")
    every = ("--log-every", "1", "--clip-norm", "1", "--no-probe", "--steps", "17")
    runs.run(*((trainer, trainer, (*flags, *every)) for trainer in ("ddp", "lightning")))
    assert runs["lightning"].losses() == pytest.approx(runs["ddp"].losses(), rel=1e-5)
    norms = [[line["metrics"] for line in runs[name].lines("step")] for name in ("ddp", "lightning")]
    assert norms[1] == [pytest.approx(values, rel=1e-4) for values in norms[0]]


def test_under_srun_it_is_lightnings_own_slurm_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcjobs.trainers.strategies.lightning import SLURMEnvironment, choose_environment

    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    environment = choose_environment(third_of_four())
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank(), environment.world_size()) == (
        3,
        1,
        1,
        4,
    )


@pytest.mark.parametrize("variables", [{}, {**SRUN, "TORCHELASTIC_RUN_ID": "x"}, {**SRUN, "SLURM_PROCID": "0"}])
def test_under_any_other_launcher_it_is_the_place_that_we_read(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcjobs.trainers.strategies.lightning import LauncherEnvironment, choose_environment

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = choose_environment(third_of_four())
    assert isinstance(environment, LauncherEnvironment)
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank(), environment.world_size()) == (
        3,
        1,
        1,
        4,
    )
    assert (environment.main_address, environment.main_port) == ("c07", 23456)


@pytest.mark.parametrize(("visible", "index"), [(1, 0), (2, 1)])
def test_a_rank_that_sees_only_its_own_gpu_trains_on_it(
    visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --gpus-per-task. CUDA is played: Lightning itself checks the devices as it does on a GPU."""
    from hpcjobs.trainers.lightning import LightningFlags
    from hpcjobs.trainers.strategies.lightning import Trainer, make_lightning_strategy

    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr("lightning.pytorch.accelerators.cuda.num_cuda_devices", lambda: visible)
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.num_cuda_devices", lambda: visible)
    group = replace(third_of_four(), device=torch.device("cuda", index), backend="nccl")
    for name in ("ddp", "fsdp"):
        strategy = make_lightning_strategy(LightningFlags(strategy=name), group, timeout_s=1.0)
        trainer = Trainer(
            accelerator="gpu", devices="auto", num_nodes=2, strategy=strategy, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        assert trainer.strategy.root_device == torch.device("cuda", index)
        assert (trainer.world_size, trainer.global_rank, trainer.num_devices) == (4, 3, 2)
