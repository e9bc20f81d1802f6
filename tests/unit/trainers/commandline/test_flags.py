"""Flags that change how a step computes leave what it computes."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcjobs import trainers
from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime.exits import ExitCode

from ..conftest import Runs, World
from ..fsdp_here import runnable

LM = ("--workload", "lm", "--sequence-length", "16", "--train-samples", "64", "--batch-size", "4", "--no-probe")
FIVE = (*LM, "--steps", "5", "--log-every", "1")
STRATEGIES = ("ddp", "ddp_scratch", "fsdp", "fsdp_scratch")
SAME = {
    "workers": ("ddp", "--workers", "1"),
    "tf32": ("ddp", "--tf32"),
    "static graph": ("ddp", "--static-graph", "--no-gradient-as-bucket-view"),
    "static graph, two passes": ("ddp", "--static-graph", "--batch-size", "2", "--accumulate", "2"),
    "small buckets": ("ddp", "--bucket-cap-mb", "0.1", "--no-broadcast-buffers"),
    **{f"{name} computed again": (name, "--activation-checkpointing") for name in STRATEGIES},
    "lightning computed again": ("lightning", "--activation-checkpointing"),
    "replicas": ("fsdp", "--shard-size", "1"),
    "kept whole": ("fsdp", "--no-reshard-after-forward"),
    "scratch kept whole": ("fsdp_scratch", "--no-reshard-after-forward"),
    "deterministic": ("ddp", "--deterministic"),
}


def test_losses_are_those_of_plain_ddp(two_ranks: Runs) -> None:
    same = {name: arguments for name, arguments in SAME.items() if arguments[0] in runnable([arguments[0]])}
    two_ranks.run(
        ("plain", "ddp", FIVE),
        ("fp16", "ddp", (*FIVE, "--precision", "fp16")),
        *((name, trainer, (*FIVE, *flags)) for name, (trainer, *flags) in same.items()),
    )
    plain = two_ranks["plain"].losses()
    for name in same:
        assert two_ranks[name].losses() == pytest.approx(plain, rel=2e-4), name
    assert two_ranks["fp16"].losses() == pytest.approx(plain, rel=1e-2)
    assert two_ranks["fp16"].losses() != plain


@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU torch.compile needs g++")
def test_a_compiled_model_has_the_losses_of_plain_ddp(world: World) -> None:
    flags = ("--workload", "mnist", "--steps", "4", "--log-every", "1", "--no-probe")
    plain, compiled = (world(1, "ddp", *flags, *more, run_dir=f"run{len(more)}") for more in ((), ("--compile",)))
    assert compiled.codes == [0], compiled.err
    assert compiled.losses() == pytest.approx(plain.losses(), rel=2e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU torch.compile needs g++")
def test_compiled_blocks_have_the_losses_of_plain_ddp_under_every_strategy(
    two_ranks: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # torch's compiler warns of itself
    flags = (*LM, "--steps", "3", "--log-every", "1", "--eval-every", "0")
    names = runnable(STRATEGIES)
    compiled = (*flags, "--compile-blocks", "--activation-checkpointing")
    two_ranks.run(("plain", "ddp", flags), *((name, name, compiled) for name in names))
    for name in names:
        assert two_ranks[name].losses() == pytest.approx(two_ranks["plain"].losses(), rel=2e-4), name


def test_synchronised_batch_norms_make_two_ranks_equal_to_one_under_every_strategy(tmp_path: Path) -> None:
    """The workload has BatchNorm, whose statistics are of a rank's own batch otherwise."""
    common = ("--workload", "worlds:normed", "--no-probe", "--steps", "6", "--log-every", "1")
    one, two = Runs(tmp_path / "one", 1), Runs(tmp_path / "two", 2)
    for runs in (one, two):
        runs.root.mkdir()
    one.run(("ddp", "ddp", (*common, "--batch-size", "16")))
    half = (*common, "--batch-size", "8")
    names = runnable(STRATEGIES)
    two.run(("apart", "ddp", half), *((name, name, (*half, "--sync-batchnorm")) for name in names))
    expected = one["ddp"].losses()
    for name in names:
        assert two[name].losses() == pytest.approx(expected, rel=2e-4), name
    assert two["apart"].losses() != pytest.approx(expected, rel=2e-4)


def test_adafactor_learns_the_same_by_both_ways_of_ddp_and_is_refused_for_parts_of_weights(
    two_ranks: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*FIVE, "--optimizer", "adafactor", "--lr", "0.01")
    two_ranks.run(*((name, name, flags) for name in ("ddp", "ddp_scratch")))
    losses = two_ranks["ddp"].losses()
    assert two_ranks["ddp_scratch"].losses() == pytest.approx(losses, rel=2e-4)
    assert losses[-1] < losses[0]  # type: ignore[operator]
    assert trainers.run("fsdp_scratch", [*flags, "--run-dir", str(tmp_path / "flat")]) == 2
    assert "--optimizer adafactor needs complete weights" in capsys.readouterr().err


def test_digits_are_read_from_idx_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, count in (("train", 16), ("t10k", 8)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.repeat(labels, 28 * 28)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + labels.tobytes())
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(tmp_path))
    flags = ["--workload", "mnist", "--data", str(tmp_path), "--batch-size", "8", "--epochs", "1"]
    assert trainers.run("ddp", flags) == 0
    summary = RunSummary.read(tmp_path)
    assert summary.samples == 16
    assert summary.evaluation is not None
    assert summary.evaluation.predictions == 8


@pytest.mark.parametrize(("trainer", "flags"), [("fsdp", ()), ("lightning", ("--strategy", "fsdp"))])
def test_fsdp_on_cpus_is_refused_by_name_where_torch_has_it_for_gpus_alone(
    trainer: str,
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torch 2.6 ended in the middle of its own code: 'Stream' object has no attribute 'record_event'."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(tmp_path))
    assert trainers.run(trainer, [*flags, *LM, "--steps", "1"]) == ExitCode.USAGE
    assert "fully_shard for GPUs alone: on CPUs use fsdp_scratch" in capsys.readouterr().err
