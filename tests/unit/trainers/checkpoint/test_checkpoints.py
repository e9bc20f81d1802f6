"""A killed run goes on as if nothing had happened; damage is noticed and stepped over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcjobs import trainers
from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.summary import RunSummary

from ..conftest import World, worlds_path
from ..fsdp_here import needs_fsdp

NOISY = ("--workload", "worlds:noisy_points", "--log-every", "1", "--checkpoint-every", "9")


def test_a_run_killed_ten_times_at_random_steps_and_resumed_has_the_same_losses_as_one_left_alone(world: World) -> None:
    flags = ("ddp", *NOISY, "--steps", "400")
    env = {"PYTHONPATH": worlds_path()}
    alone = world(2, *flags, env=env, run_dir="alone")
    chance = random.Random(0)
    for kill_at in sorted(chance.sample(range(10, 350), 10)):
        world(2, *flags, env=env, run_dir="killed", kill_at_step=kill_at)
    ended = world(2, *flags, env=env, run_dir="killed")
    assert ended.codes == [0, 0]
    assert ended.summary.resumed_from_step is not None
    assert ended.summary.resumed_from_step > 0
    assert [(line["step"], line["loss"]) for line in ended.lines("step")] == [
        (line["step"], line["loss"]) for line in alone.lines("step")
    ]
    assert ended.summary.evaluation == alone.summary.evaluation


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of a world of one, with checkpoints at steps 18, 27 and 30."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(tmp_path))
    assert trainers.run("ddp", [*NOISY, "--steps", "30"]) == 0
    return tmp_path


def again(*flags: str) -> int:
    return trainers.run("ddp", [*NOISY, "--steps", "30", *flags])


def test_the_newest_are_kept_and_latest_points_to_the_last(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    remaining = sorted(path.name for path in folder.glob("step-*"))
    assert remaining == ["step-00000018", "step-00000027", "step-00000030"]
    assert (folder / "best").resolve().name in remaining
    assert (folder / "latest").resolve().name == "step-00000030"


@pytest.mark.parametrize("how", ["truncated", "flipped", "without manifest"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(
    run_dir: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run_dir / "checkpoints" / "step-00000030"
    content = (last / "state.pt").read_bytes()
    if how == "truncated":
        (last / "state.pt").write_bytes(content[:-100])
    elif how == "flipped":
        (last / "state.pt").write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    else:
        (last / "manifest.json").unlink()
    capsys.readouterr()
    assert again() == 0
    output = capsys.readouterr().out
    assert "passing over the damaged checkpoint step-00000030" in output
    assert RunSummary.read(run_dir).resumed_from_step == 27


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_by_itself(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for state in run_dir.glob("checkpoints/step-*/state.pt"):
        state.write_bytes(b"")
    assert again() == 17
    assert "is sound. Hint: --resume none starts over" in capsys.readouterr().err
    assert again("--resume", "none") == 0
    assert RunSummary.read(run_dir).resumed_from_step is None


def test_synchronous_and_background_saves_hold_the_same(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    other = tmp_path_factory.mktemp("other")
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(other))
    assert again("--no-checkpoint-async") == 0
    states = [torch.load(path / "checkpoints/latest/state.pt") for path in (run_dir, other)]
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name])


def test_a_checkpoint_of_one_rank_goes_on_with_two_and_says_what_changed(world: World) -> None:
    env = {"PYTHONPATH": worlds_path()}
    world(1, "ddp", *NOISY, "--steps", "10", env=env)
    ended = world(2, "ddp", *NOISY, "--steps", "12", "--batch-size", "4", env=env)
    assert ended.codes == [0, 0]
    assert "at step 10; world size 1 -> 2: random generators start anew" in ended.out[0]
    assert [line["step"] for line in ended.lines("step")] == list(range(1, 13))


@needs_fsdp
def test_sharded_weights_are_saved_by_the_ranks_that_hold_them_and_every_file_is_checked(
    world: World, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": worlds_path()}
    flags = ("fsdp", *NOISY, "--steps", "60")
    alone = world(2, *flags, env=env, run_dir="alone")
    world(2, *flags, env=env, run_dir="killed", kill_at_step=30)
    folder = tmp_path / "killed/checkpoints"
    newest = sorted(folder.glob("step-*"))[-1]
    assert sorted(path.name for path in newest.glob("parts/*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    part = newest / "parts/__1_0.distcp"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    ended = world(2, *flags, env=env, run_dir="killed")
    assert ended.codes == [0, 0]
    assert f"passing over the damaged checkpoint {newest.name}: parts/__1_0.distcp has checksum" in ended.out[0]
    assert ended.losses() == alone.losses()
    other = world(1, *flags[:-1], "62", "--batch-size", "16", env=env, run_dir="killed")
    assert other.codes == [0]
    assert "at step 60; world size 2 -> 1" in other.out[0]
    assert len(other.losses()) == 62


@pytest.mark.parametrize("manifest", ["", "null", "{}", "[]", '{"files": null}', '{"files": {"state.pt": 1}}'])
def test_a_checkpoint_whose_manifest_is_no_manifest_is_passed_over(tmp_path: Path, manifest: str) -> None:
    place = tmp_path / "step-00000010"
    place.mkdir()
    (place / "state.pt").write_bytes(b"")
    (place / checkpoints.MANIFEST).write_text(manifest)
    ((looked, wrong),) = checkpoints.newest_valid(tmp_path)
    assert looked == place
    assert wrong is not None
    assert checkpoints.MANIFEST in wrong
    assert checkpoints.recorded_loss(place) is None
