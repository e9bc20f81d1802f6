"""A killed run goes on as if nothing had happened; damage is noticed and stepped over."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpcjobs import trainers
from hpcjobs.record.summary import RunSummary
from hpcjobs.runtime import checkpoints
from hpcjobs.trainers.checkpoint import ShardBuffers

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


@pytest.mark.parametrize("error", ["kill", "ENOSPC"])
def test_a_run_in_which_any_change_of_a_file_fails_goes_on_with_the_same_losses(world: World, error: str) -> None:
    flags = ("ddp", "--workload", "faulty:failing", "--log-every", "1", "--checkpoint-every", "1", "--steps", "3")
    flags, env = (*flags, "--checkpoint-keep", "1"), {"PYTHONPATH": worlds_path(), "FAILS": error, "FAILS_AT": "0"}
    alone = world(1, *flags, env=env, run_dir="alone")
    for number in range(1, 1000):
        first = world(1, *flags, env={**env, "FAILS_AT": f"{number}"}, run_dir=f"{number}")
        if first.codes == [0] and "fails: " not in first.out[0]:
            break  # it has so many changes no more
        assert first.codes[0] in ([-9] if error == "kill" else [0, 20]), (number, first)
        assert "Traceback" not in first.err[0], (number, first)
        later = world(1, *flags, env=env, run_dir=f"{number}")
        assert later.codes == [0], (number, first, later)
        assert later.losses() == alone.losses(), (number, first, later)
        assert later.summary.evaluation == alone.summary.evaluation
        assert "damaged" not in later.out[0] + later.err[0], (number, first, later)
        newest, damage = next(iter(checkpoints.newest_valid(later.run_dir / "checkpoints")))
        assert (newest.name, damage) == ("step-00000003", None), (number, first, later)
    assert number > 20, "so many changes there are at least"


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


@pytest.mark.parametrize("later", [(2, "3"), (1, "12")])
def test_a_run_whose_world_or_batch_changes_makes_the_steps_it_was_asked_for_and_keeps_the_newest_checkpoints(
    world: World, later: tuple[int, str]
) -> None:
    env = {"PYTHONPATH": worlds_path()}
    flags = ("ddp", "--workload", "worlds:noisy_points", "--log-every", "1", "--checkpoint-every", "3")
    schedule = ("--checkpoint-keep", "2", "--lr-schedule", "linear", "--lr-final", "0", "--steps", "21")
    first = world(1, *flags, *schedule, "--batch-size", "3", env=env, kill_at_step=12)
    killed_at = max(int(place.name[5:]) for place in first.run_dir.glob("checkpoints/step-*"))
    ended = world(later[0], *flags, *schedule, "--batch-size", later[1], env=env)
    assert ended.codes == [0] * later[0], ended.err
    lines = ended.lines("step")
    assert [line["step"] for line in lines] == list(range(1, 22))
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * (1 - n / 20) for n in range(21)])
    assert ended.summary.resumed_from_step == killed_at
    folder = ended.run_dir / "checkpoints"
    assert (folder / "latest").resolve().name == "step-00000021"
    assert [place.name for place in checkpoints.steps(folder)][:2] == ["step-00000021", "step-00000018"]


def test_a_run_of_so_many_epochs_takes_each_sample_as_often_and_goes_on_with_its_rate_in_a_larger_world(
    world: World, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": worlds_path(), "LISTED": str(tmp_path / "read.txt")}
    flags = ("ddp", "--workload", "worlds:listed", "--log-every", "1", "--checkpoint-every", "1", "--batch-size", "4")
    length = ("--epochs", "3", "--lr-schedule", "linear", "--lr-final", "0")
    world(1, *flags, "--lr-schedule", "linear", "--steps", "20", env=env)  # an epoch and a quarter
    ended = world(2, *flags, *length, env=env)
    assert ended.codes == [0, 0], ended.err
    numbers = [int(number) for number in (tmp_path / "read.txt").read_text().split()]
    assert sorted(numbers) == sorted(3 * list(range(64)))
    rates = [line["lr"] for line in ended.lines("step") if int(str(line["step"])) > 20]
    assert rates == pytest.approx([0.1 * (1 - n / 23) for n in range(10, 24)]), "10 of 24 such steps are behind it"
    assert ended.summary.epochs == 3


@pytest.mark.parametrize("job", ["HPCJOBS_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"])
@pytest.mark.parametrize("first", ["none", "folder"])
def test_resume_says_where_the_first_attempt_of_a_job_begins_and_later_ones_go_on_from_what_it_saved(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, first: str, job: str
) -> None:
    """Also of a batch script that is submitted by hand, and of torchrun with `--max-restarts`."""
    flags = ("--resume", "none" if first == "none" else str(run_dir / "checkpoints" / "step-00000018"))
    own = tmp_path_factory.mktemp("own") if first == "folder" else run_dir
    monkeypatch.setenv("HPCJOBS_RUN_DIR", str(own))
    monkeypatch.setenv(job, "77")
    begun = None if first == "none" else 18
    assert again(*flags, "--steps", "25") == 0
    assert RunSummary.read(own).resumed_from_step == begun
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT" if job == "TORCHELASTIC_RUN_ID" else "SLURM_RESTART_COUNT", "1")
    assert again(*flags, "--steps", "32") == 0
    assert RunSummary.read(own).resumed_from_step == 25
    monkeypatch.setenv(job, "78")  # whose first attempt saved nothing
    assert again(*flags, "--steps", "40") == 0
    assert RunSummary.read(own).resumed_from_step == begun


def test_weights_that_are_not_finite_are_not_saved_and_the_next_attempt_begins_before_them(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the last step is finite: its update is what is too large."""
    assert again("--steps", "31", "--lr", "1e39", "--checkpoint-every", "1") == 13
    assert "weights are not finite after step 31, which is not saved" in capsys.readouterr().err
    assert again("--steps", "32") == 0
    assert RunSummary.read(run_dir).resumed_from_step == 30


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_damaged_checkpoint_does_not_count_as_kept(run_dir: Path, damaged: int, keep: int) -> None:
    folder = run_dir / "checkpoints"
    assert again("--steps", "36", "--checkpoint-keep", "4") == 0
    for newest in checkpoints.steps(folder)[:damaged]:
        (newest / "state.pt").write_bytes(b"")
    resumed = (30, 27, 18)[damaged - 1]
    flags = ("--steps", str(resumed + 1), "--checkpoint-keep", str(keep), "--eval-every", "0")
    assert again(*flags) == 0
    assert RunSummary.read(run_dir).resumed_from_step == resumed
    sound = [place.name for place in checkpoints.steps(folder) if checkpoints.damage(place) is None]
    expected = [f"step-{step:08d}" for step in (resumed + 1, 30, 27, 18) if step <= resumed + 1]
    assert sound == expected[:keep]
    assert [place.name for place in checkpoints.steps(folder)] == sound


def test_a_run_that_starts_over_in_its_folder_keeps_what_it_saves(run_dir: Path) -> None:
    assert again("--resume", "none", "--steps", "20") == 0
    folder = run_dir / "checkpoints"
    assert [place.name for place in checkpoints.steps(folder)][:3] == [
        "step-00000020",
        "step-00000018",
        "step-00000009",
    ]
    assert (folder / "latest").resolve().name == "step-00000020"
    assert again("--steps", "22") == 0
    assert RunSummary.read(run_dir).resumed_from_step == 20


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


def test_a_copy_of_the_state_waits_for_each_gpu_that_holds_a_part_of_it_not_for_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    awaited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", awaited.append)
    with FakeTensorMode():
        state = {"model": [torch.empty(4, device="cuda:1"), torch.empty(3)], "moments": torch.empty(4, device="cuda:3")}
        ShardBuffers().copy(state)
    assert sorted(map(str, awaited)) == ["cuda:1", "cuda:3"]
