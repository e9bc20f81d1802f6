"""Which checkpoints of a script stay, where some are damaged, hold NaN, or the disk is full at any of its writes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_run import read_losses, run_script

from hpcjobs.runtime import checkpoints
from hpcjobs.runtime.checkpoints import CheckpointMeta
from hpcjobs.runtime.exits import BadCheckpoint
from hpcjobs.runtime.script_checkpoints import Part, StateWriter, read_state

BEGIN = "import os, hpcjobs.runtime\nrun = hpcjobs.runtime.start(run_dir='folder', keep=int(os.environ['KEEP']))\n"
SAVE = "run.save({step}, {{'step': {step}}})\nrun.log({step}, loss=1.0)\n"
EACH_WRITE = """
import errno, os, sys, traceback
from pathlib import Path
import hpcjobs.runtime
from hpcjobs.runtime import checkpoint_writer, signals

checkpoint_writer.INSISTING_PAUSE_S = 0.01
checkpoint_writer.FIRST_PAUSE_S = float(os.environ["PAUSE_S"])
left = 0

def fail(event, arguments):
    global left
    writes = event in ("os.mkdir", "os.rename", "os.symlink") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if writes and "/folder" in f"{arguments[0]}{arguments[1]}":
        left -= 1
        if left == 0 or (left < 0 and os.environ["STAYS"] == "yes"):
            number = getattr(errno, os.environ["ERROR"])
            raise OSError(number, os.strerror(number), str(arguments[0]))

def train():
    signals.LAST_SAVE_S = 0.05 if os.environ["STAYS"] == "yes" else 60.0
    run = hpcjobs.runtime.start(run_dir=str(Path("folder").absolute()), keep=1)
    sys.addaudithook(fail)
    for step in (1, 2, 3):
        run.log(step, loss=1.0)
        run.save(step, {"step": step})
    run.finish()

number = 0
while True:
    number += 1
    place = Path(f"{number}")
    (place / "folder").mkdir(parents=True)
    os.chdir(place)
    if (child := os.fork()) == 0:
        left = number
        code = 0
        try:
            train()
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:
            print("ends with", type(error).__name__, error, flush=True)
            code = getattr(error, "code", 1)
        Path("../left").write_text(str(left))
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir("..")
    Path(place, "code").write_text(str(code))
    if int(Path("left").read_text()) > 0:  # it has so many writes no more
        break
"""

KILLED_AT_EACH_CHANGE = """
import os, sys
from pathlib import Path
import hpcjobs.runtime

left = 0

def kill(event, arguments):
    global left
    changes = event in ("os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if changes:
        left -= 1
        if left == 0:
            os._exit(9)

def train(kills_at):
    global left
    left = kills_at
    run = hpcjobs.runtime.start(run_dir=str(Path("folder").absolute()), keep=1)
    begun = (run.load() or {"step": 0})["step"]
    Path("begun").write_text(str(begun))
    for step in range(begun + 1, 4):
        run.log(step, loss=1.0)
        run.save(step, {"step": step})
    run.finish()
    Path("completed").touch()

def in_a_process(kills_at):
    if (child := os.fork()) == 0:
        code = 1
        try:
            train(kills_at)
            code = 0
        except SystemExit as ended:
            code = ended.code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

sys.addaudithook(kill)
for number in range(1, 1000):
    Path(f"{number}/folder").mkdir(parents=True)
    os.chdir(f"{number}")
    first = in_a_process(number)
    metrics = Path("folder/metrics.jsonl")
    Path("before").write_text(metrics.read_text() if metrics.exists() else "")
    later = in_a_process(0)
    Path("codes").write_text(f"{first} {later}")
    os.chdir("..")
    if first != 9:  # it has so many changes no more
        break
"""


def truncate(place: Path) -> None:
    (place / "state.json").write_bytes(b"{")


def change_a_byte(place: Path) -> None:
    content = (place / "state.json").read_bytes()
    (place / "state.json").write_bytes(content[:-1] + b" ")


def remove_the_manifest(place: Path) -> None:
    (place / checkpoints.MANIFEST).unlink()


def remove_the_state(place: Path) -> None:
    (place / "state.json").unlink()


DAMAGES = (truncate, change_a_byte, remove_the_manifest, remove_the_state)


def list_sound(folder: Path) -> list[str]:
    return [place.name for place in checkpoints.steps(folder) if checkpoints.damage(place) is None]


@pytest.fixture(scope="module")
def four_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    saves = "".join(SAVE.format(step=step) for step in range(1, 5))
    done = run_script(folder, f"{BEGIN}{saves}run.finish()", KEEP="4")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_damaged_checkpoints_do_not_count_as_kept(
    four_saved: Path, tmp_path: Path, damaged: int, damage: Callable[[Path], None]
) -> None:
    for keep in (1, 2, 3):
        place = tmp_path / str(keep)
        shutil.copytree(four_saved, place, symlinks=True)
        folder = place / "folder" / "checkpoints"
        for newest in checkpoints.steps(folder)[:damaged]:
            damage(newest)
        resumed = 4 - damaged
        text = f"assert run.load() == {{'step': {resumed}}}\nrun.save({resumed}, {{'again': 1}})\nrun.finish()"
        done = run_script(place, BEGIN + text, KEEP=str(keep))
        assert done.returncode == 0, done.stderr
        assert "passing over the damaged checkpoint" in done.stdout
        sound = list_sound(folder)
        assert sound == [f"step-{step:08d}" for step in range(resumed, 0, -1)][:keep]
        assert [one.name for one in checkpoints.steps(folder)] == sound, "damaged ones are removed"
        assert (folder / "latest").resolve().name == sound[0]


def test_a_checkpoint_of_the_same_step_is_there_until_the_new_one_is_and_one_left_aside_by_a_kill_is_found(
    tmp_path: Path,
) -> None:
    begun = run_script(tmp_path, BEGIN + SAVE.format(step=7) + "run.finish()", KEEP="1")
    assert begun.returncode == 0, begun.stderr
    folder = tmp_path / "folder" / "checkpoints"
    (folder / "step-00000007").rename(folder / "step-00000007.replaced")  # killed between the two renames
    again = run_script(tmp_path, f"{BEGIN}print('at', run.load())\n{SAVE.format(step=7)}run.finish()", KEEP="1")
    assert again.returncode == 0, again.stderr
    assert "at {'step': 7}" in again.stdout
    assert sorted(place.name for place in folder.glob("step-*")) == ["step-00000007"]


def test_a_checkpoint_that_may_not_be_removed_keeps_its_name(four_saved: Path, tmp_path: Path) -> None:
    shutil.copytree(four_saved, tmp_path / "four", symlinks=True)
    folder = tmp_path / "four" / "folder" / "checkpoints"
    (folder / "step-00000001").rename(tmp_path / "elsewhere")
    (folder / "step-00000001").symlink_to(tmp_path / "elsewhere")
    (folder / "step-00000002").chmod(0o555)  # which root may remove
    checkpoints.prune(folder, keep=1, soundness=checkpoints.Soundness())
    assert [place.name for place in checkpoints.steps(folder)] == [
        "step-00000004", *(["step-00000002"] if os.geteuid() else []), "step-00000001",
    ]  # fmt: skip
    assert list_sound(tmp_path / "four" / "folder" / "checkpoints")[-1] == "step-00000001"
    (folder / "step-00000001").unlink()
    checkpoints.prune(folder, keep=1, soundness=checkpoints.Soundness())
    assert not list(folder.glob(".step-*"))


PROTECTED = ["protected", "protected part", "unreadable part"] if os.geteuid() else []  # root may remove it


@pytest.mark.parametrize("kind", ["link", "left link", "dangling link", *PROTECTED])
def test_a_step_is_saved_again_whatever_was_in_its_place(tmp_path: Path, kind: str) -> None:
    saves = SAVE.format(step=7)
    assert run_script(tmp_path, f"{BEGIN}{saves}run.finish()", KEEP="1").returncode == 0
    place = tmp_path / "folder" / "checkpoints" / "step-00000007"
    elsewhere = tmp_path / "elsewhere"
    again = BEGIN.replace("keep=", "step=0, keep=")
    for number in range(3):
        if kind in PROTECTED:
            (place / "more").mkdir()
            (place / "more" / str(number)).touch()
            (place if kind == "protected" else place / "more").chmod(0o311 if kind == "unreadable part" else 0o555)
        elif number == 0:
            place.rename(elsewhere)
            place.symlink_to(tmp_path / "nowhere" if kind == "dangling link" else elsewhere)
            if kind == "left link":  # by a kill in between
                place.with_name(f"{place.name}.replaced").symlink_to(elsewhere)
        done = run_script(tmp_path, f"{again}{saves}run.finish()", KEEP="1")
        assert done.returncode == 0, done.stderr
        assert ("more can't be changed" in done.stderr) == kind.endswith("part"), done.stderr
        assert not place.is_symlink()
        assert checkpoints.steps(place.parent)[0].name == place.name
    for one in place.parent.glob("*/more"):
        one.chmod(0o755)
    stays = sorted(path.name for path in place.parent.glob("**/more/*"))
    assert stays == (["0", "1", "2"] if kind in PROTECTED else [])
    assert not any(map(checkpoints.find_damage, checkpoints.steps(place.parent)))
    assert kind in PROTECTED or (elsewhere / "manifest.json").exists()


def test_an_empty_folder_that_cannot_be_changed_protects_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "folder" / "checkpoints"
    for step in range(3):
        done = run_script(tmp_path, f"{BEGIN}{SAVE.format(step=step)}run.finish()", KEEP="1")
        assert (done.returncode, done.stderr) == (0, "")
        (folder / f"step-{step:08}" / "logs").mkdir(0o555)
    assert list_sound(folder) == ["step-00000002"]


@pytest.mark.skipif(not os.geteuid(), reason="root may remove it")
def test_protected_files_in_the_place_of_a_checkpoint_all_stay(tmp_path: Path) -> None:
    saves = SAVE.format(step=7)
    place = tmp_path / "folder" / "checkpoints" / "step-00000007"
    place.parent.mkdir(parents=True)
    for number in range(3):
        place.write_text(str(number))
        place.chmod(0o444)
        done = run_script(tmp_path, f"{BEGIN.replace('keep=', 'step=0, keep=')}{saves}run.finish()", KEEP="1")
        assert done.returncode == 0, done.stderr
        place.rename(tmp_path / str(number))
    assert sorted(one.read_text() for one in place.parent.iterdir() if one.is_file()) == ["0", "1", "2"]


def test_a_program_that_goes_back_to_an_earlier_step_keeps_what_it_saves_then(tmp_path: Path) -> None:
    saves = "".join(SAVE.format(step=step) for step in (10, 20))
    first = run_script(tmp_path, f"{BEGIN}{saves}run.finish()", KEEP="2")
    assert first.returncode == 0, first.stderr
    back = BEGIN.replace("keep=", "step=0, keep=")
    done = run_script(tmp_path, back + SAVE.format(step=5) + "run.finish()", KEEP="1")
    assert done.returncode == 0, done.stderr
    assert list_sound(tmp_path / "folder" / "checkpoints") == ["step-00000005"]
    assert "resumed at step 5" in run_script(tmp_path, BEGIN, KEEP="1").stdout


@pytest.mark.parametrize(
    ("error", "stays", "pause_s"),
    [
        *(("ENOSPC", "no", "0"), ("ENOSPC", "no", "60"), ("ENOSPC", "yes", "60")),
        *((error, "no", "0") for error in ("EIO", "EDQUOT", "ESTALE", "EACCES")),
    ],
)
def test_any_write_that_fails_leaves_the_newest_state_or_ends_the_run_with_its_code(
    tmp_path: Path, error: str, stays: str, pause_s: str
) -> None:
    done = run_script(tmp_path, EACH_WRITE, ERROR=error, STAYS=stays, PAUSE_S=pause_s, KEEP="1")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    tries = sorted(tmp_path.glob("*/code"), key=lambda path: int(path.parent.name))
    assert len(tries) > 15, "so many writes there are at least"
    for path in tries:
        code, folder = int(path.read_text()), path.parent / "folder" / "checkpoints"
        sound = list_sound(folder)
        lines = (path.parent / "folder" / "metrics.jsonl").read_text().splitlines() if stays == "no" else []
        noted = [line["step"] for line in map(json.loads, lines) if line["kind"] == "checkpoint"]
        if code == 0:
            assert sound[0] == "step-00000003", f"write {path.parent.name}"
            assert stays == "yes" or noted[-1] == 3
        else:
            assert code == 20, done.stdout
        if stays == "no":
            assert sound[0] == "step-00000003", f"write {path.parent.name}"
            assert set(noted) <= {1, 2, 3}
        elif int(path.parent.name) > 12:
            assert sound, f"write {path.parent.name}: an earlier checkpoint was complete"


def test_a_run_that_is_killed_at_any_change_of_a_file_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    done = run_script(tmp_path, KILLED_AT_EACH_CHANGE)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    tries = sorted(tmp_path.glob("*/codes"), key=lambda path: int(path.parent.name))
    assert [path.read_text() for path in tries[:-1]] == ["9 0"] * (len(tries) - 1)
    assert len(tries) > 30, "so many changes there are at least"
    for path in tries:
        folder, place = path.parent / "folder", f"change {path.parent.name}"
        noted = [
            json.loads(line)["step"]
            for line in (path.parent / "before").read_text().splitlines(keepends=True)
            if line.endswith("\n") and json.loads(line)["kind"] == "checkpoint"
        ]
        assert int((path.parent / "begun").read_text()) >= max(noted, default=0), place
        assert read_losses(folder) == [(step, 1.0) for step in (1, 2, 3)], place
        assert list_sound(folder / "checkpoints")[0] == "step-00000003", place
        assert (folder / "checkpoints" / "latest").resolve().name == "step-00000003", place
        assert list_sound(folder / "checkpoints") == [each.name for each in checkpoints.steps(folder / "checkpoints")]


def test_no_line_of_metrics_names_a_checkpoint_that_is_not_on_disk_and_the_last_state_is_written(
    tmp_path: Path,
) -> None:
    """The folder of checkpoints can't be written from step 2 to step 4; later saves come in the pause after that."""
    text = f"""
{BEGIN}
folder = run.run_dir / "checkpoints"
run.log(1, loss=1.0)
run.save(1, {{"step": 1}})
run._checkpoints._writer.wait()
folder.rename(folder.with_name("away"))
folder.touch()
for step in (2, 3, 4):
    run.log(step, loss=1.0)
    run.save(step, {{"step": step}})
run._checkpoints._writer.wait()
folder.unlink()
folder.with_name("away").rename(folder)
for step in (5, 6):
    run.log(step, loss=1.0)
    run.save(step, {{"step": step}})
run.finish()
"""
    done = run_script(tmp_path, text, KEEP="2")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "folder"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "checkpoint"] == [1, 6]
    assert "at {'step': 6}" in run_script(tmp_path, f"{BEGIN}print('at', run.load())", KEEP="2").stdout


@pytest.mark.parametrize("what", ["metrics.jsonl", "summary.json"])
def test_metrics_or_a_summary_that_cannot_be_written_are_one_line_and_code_20(tmp_path: Path, what: str) -> None:
    text = f"{BEGIN}(run.run_dir / '{what}').mkdir(exist_ok=True)\nrun.log(1, loss=1.0)\nrun.finish()"
    done = run_script(tmp_path, text, KEEP="2")
    assert done.returncode == 20
    assert "Traceback" not in done.stderr
    assert f"{what} can't be written: Is a directory" in done.stderr.splitlines()[-1]


def test_a_run_that_waits_for_its_last_checkpoint_does_not_stand_still(tmp_path: Path) -> None:
    text = f"""
from hpcjobs.runtime import script_checkpoints, watchdog
import time
watchdog.LOOK_S = watchdog.GATHER_S = 0.05
write = script_checkpoints.write_state
script_checkpoints.write_state = lambda *arguments: (time.sleep(1.5), write(*arguments))[1]  # a slow disk
{BEGIN}
run.watch(after_s=0.3)
run.log(1, loss=1.0)
run.save(1, {{"step": 1}})
run.finish()
"""
    done = run_script(tmp_path, text, KEEP="2")
    assert done.returncode == 0, done.stderr
    assert list_sound(tmp_path / "folder" / "checkpoints") == ["step-00000001"]


NO_FSYNC_OF_FOLDERS = """
import errno, os, stat
sync = os.fsync
def refuse_folders(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")
    sync(descriptor)
os.fsync = refuse_folders
"""


def test_checkpoints_are_completed_on_a_file_system_that_has_no_fsync_of_folders(tmp_path: Path) -> None:
    done = run_script(tmp_path, NO_FSYNC_OF_FOLDERS + BEGIN + SAVE.format(step=7) + "run.finish()", KEEP="1")
    assert done.returncode == 0, done.stderr
    assert "resumed at step 7" in run_script(tmp_path, BEGIN, KEEP="1").stdout


def test_a_state_with_nan_is_not_written_and_ends_the_run_with_its_code_if_it_is_the_last(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    states = "import torch\ngood, bad = torch.ones(3), torch.tensor([1.0, float('nan')])\n"
    good, bad = "run.save(1, {'model': {'w': good}, 'seen': float('nan')})\n", "run.save(2, {'model': {'w': bad}})\n"
    done = run_script(tmp_path, f"{states}{BEGIN}{good}{bad}run.finish()", KEEP="1")
    assert done.returncode == 13
    assert "checkpoint of step 2 not written: model.w has NaN" in done.stderr
    assert "the last good one is step-00000001" in done.stderr
    assert list_sound(tmp_path / "folder" / "checkpoints") == ["step-00000001"]
    meant = f"{states}{BEGIN}{bad.replace('}})', '}}, allow_nan=True)')}run.finish()"
    assert run_script(tmp_path, meant, KEEP="1").returncode == 0
    parts = f"{states}{BEGIN}run.save(3, {{'w': [good, bad][run.rank]}}, sharded=True)\nrun.finish()"
    sharded = run_script(tmp_path, parts, ranks=2, KEEP="1", MASTER_PORT="29613")
    assert sharded.returncode == 13, sharded.stderr
    assert "w of rank 1 has NaN" in sharded.stderr
    assert list_sound(tmp_path / "folder" / "checkpoints") == ["step-00000002"]


def test_the_best_checkpoint_is_chosen_anew_once_its_step_is_written_again(tmp_path: Path) -> None:
    """A run that resumes from an earlier step replaces the best state by a worse one of the same step."""

    def save(attempt: str, *steps: tuple[int, float]) -> None:
        writer = StateWriter(tmp_path, keep=3, rank=0, attempt=attempt, on_written=lambda step: None)
        for step, loss in steps:
            writer.save(CheckpointMeta(step, 0, 0, 1, 0, loss), Part({"loss": loss}, False), last=False)
        writer.finish(within_s=60)
        writer.close()

    save("first", (5, 0.9), (10, 0.1))
    save("second", (10, 0.8), (15, 0.5), (20, 0.6))
    assert (tmp_path / checkpoints.BEST).resolve().name == "step-00000015"


@pytest.mark.parametrize("pause_s", ["0", "600"])
@pytest.mark.parametrize("recovers", [True, False])
def test_a_state_with_nan_does_not_take_the_place_of_a_sound_one_that_could_not_be_written_yet(
    tmp_path: Path, pause_s: str, recovers: bool
) -> None:
    """The folder of checkpoints can't be written while steps 2 and 3 are saved, with and without a pause after that."""
    pytest.importorskip("torch")
    text = f"""
import torch
from hpcjobs.runtime import checkpoint_writer, signals
checkpoint_writer.INSISTING_PAUSE_S, checkpoint_writer.FIRST_PAUSE_S = 0.01, {pause_s}
signals.LAST_SAVE_S = 60.0 if {recovers} else 0.05
{BEGIN}
folder = run.run_dir / "checkpoints"
run.save(1, {{"w": torch.full((3,), 1.0)}})
run._checkpoints._writer.wait()
folder.rename(folder.with_name("away"))
folder.touch()
run.save(2, {{"w": torch.full((3,), 2.0)}})
run.save(3, {{"w": torch.full((3,), float("nan"))}})
run._checkpoints._writer.wait()
if {recovers}:
    folder.unlink()
    folder.with_name("away").rename(folder)
run.finish()
"""
    done = run_script(tmp_path, text, KEEP="2")
    assert done.returncode == 13, done.stderr
    assert "checkpoint of step 3 not written: w has NaN" in done.stderr
    assert "step 2 is still to be written" in done.stderr
    if recovers:
        after = run_script(tmp_path, f"{BEGIN}print('at', run.step, run.load()['w'].tolist())", KEEP="2")
        assert "at 2 [2.0, 2.0, 2.0]" in after.stdout, after.stderr
    else:
        assert "step 2 can't be saved" in done.stderr


def test_of_two_starts_at_once_the_later_one_alone_writes_checkpoints(tmp_path: Path) -> None:
    """As where Slurm took the node of the first one for dead. The first one's saves fail, and it ends with code 20."""
    later = f"""
{BEGIN}
assert run.step == 2
draft = run.run_dir / "checkpoints" / f".step-00000002.kit-{{run.attempt}}"
draft.mkdir()
print("begun", flush=True)
input()
assert draft.exists(), "the first start has removed a draft of this one"
draft.rmdir()
{SAVE.format(step=3)}{SAVE.format(step=4)}
run.finish()
"""
    (tmp_path / "later.py").write_text(later)
    text = f"""
import subprocess, sys
from hpcjobs.runtime import checkpoint_writer, signals
signals.LAST_SAVE_S, checkpoint_writer.FIRST_PAUSE_S, checkpoint_writer.INSISTING_PAUSE_S = 0.05, 0.0, 0.01
{BEGIN}
{SAVE.format(step=1)}{SAVE.format(step=2)}
run._checkpoints._writer.wait()
env = os.environ | {{"MASTER_PORT": "29614"}}
pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}}
other = subprocess.Popen([sys.executable, "later.py"], env=env, text=True, **pipes)
while other.stdout.readline() != "begun\\n":
    pass
{SAVE.format(step=7)}{SAVE.format(step=8)}
run._checkpoints._writer.wait()
other.communicate("\\n")
print("later ended with", other.returncode, flush=True)
run.finish()
"""
    done = run_script(tmp_path, text, KEEP="2")
    assert "later ended with 0" in done.stdout, done.stderr
    assert done.returncode == 20
    assert "checkpoint of step 7 not written: a later start of this run writes its checkpoints" in done.stderr
    assert "Hint: one start at a time may run in a run folder" in done.stderr
    assert list_sound(tmp_path / "folder" / "checkpoints") == ["step-00000004", "step-00000003"]


KILLED_AT_LINK = """
import os, signal
from pathlib import Path
import hpcjobs.runtime
run = hpcjobs.runtime.start(run_dir="folder")
link = Path.symlink_to

def link_or_die(self, target, *more):
    if run.step == 0 and target == "step-00000002":
        os.kill(os.getpid(), signal.SIGKILL)
    link(self, target, *more)

Path.symlink_to = link_or_die
for step in range(run.step + 1, 3):
    run.log(step, loss=1.0)
    run.save(step, {"step": step})
run.finish()
"""


def test_a_run_that_was_killed_before_latest_was_turned_turns_it_when_it_is_started_again(tmp_path: Path) -> None:
    """Also where no step is left, and no other checkpoint is written."""
    folder = tmp_path / "folder" / "checkpoints"
    assert run_script(tmp_path, KILLED_AT_LINK).returncode == -9
    assert (folder / "latest").readlink().name == "step-00000001"
    assert (folder / "step-00000002").is_dir()
    again = run_script(tmp_path, KILLED_AT_LINK)
    assert again.returncode == 0, again.stderr
    assert (folder / "latest").readlink().name == "step-00000002"


FAILS_ONCE = """
import errno
import hpcjobs.runtime
from hpcjobs.runtime import checkpoints, run as runs, script_checkpoints

script_checkpoints.SHARDS_WAIT_S, runs.LAST_SAVE_S = 2.0, 10.0
complete, failures = checkpoints.Draft.complete, [OSError(errno.ENOSPC, "No space left on device")]

def fail_once(draft, sums):
    if draft.meta.step == 2 and failures:
        raise failures.pop()
    return complete(draft, sums)

checkpoints.Draft.complete = fail_once
run = hpcjobs.runtime.start(run_dir="folder")
for step in (1, 2):
    run.log(step, loss=1.0)
    run.save(step, {"step": step}, sharded=True)
run.finish()
"""


def test_the_parts_of_the_other_ranks_are_still_there_when_a_sharded_checkpoint_is_completed_again(
    tmp_path: Path,
) -> None:
    ended = run_script(tmp_path, FAILS_ONCE, ranks=2, MASTER_PORT="29500", MASTER_ADDR="127.0.0.1")
    assert ended.returncode == 0, ended.stderr
    assert "not written: No space left on device" in ended.stderr
    newest = (tmp_path / "folder" / "checkpoints" / "latest").resolve()
    assert (newest.name, checkpoints.damage(newest)) == ("step-00000002", None)
    assert sorted(path.name for path in newest.iterdir()) == ["manifest.json", "ranks"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_state_that_another_user_puts_there_after_the_look_at_its_owner_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a group may write to the folder of checkpoints, each of its members may rename what lies there."""
    place, planted = tmp_path / "step-00000001", tmp_path / "planted"
    place.mkdir()
    (place / "state.pkl").write_bytes(pickle.dumps({"mine"}))
    planted.write_bytes(f"cposix\nsystem\n(S'touch {tmp_path}/ran'\ntR.".encode())
    os.chown(planted, 65534, 65534)
    looks, look_at = list[Path](), Path.stat

    def look_then_swap(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        status = look_at(path, follow_symlinks=follow_symlinks)
        looks.extend([path] if path.name == "state.pkl" else [])
        if len(looks) == 2:  # whether it is there, then who owns it
            planted.replace(place / "state.pkl")
        return status

    monkeypatch.setattr(Path, "stat", look_then_swap)
    meta = CheckpointMeta(1, 0, 0, 1, 0, None)
    assert read_state(place, meta, rank=0, own=True, world_size=1) == {"mine"}
    monkeypatch.undo()
    os.chown(place / "state.pkl", 65534, 65534)
    with pytest.raises(BadCheckpoint, match="belongs to user 65534"):
        read_state(place, meta, rank=0, own=True, world_size=1)
    assert not (tmp_path / "ran").exists()
