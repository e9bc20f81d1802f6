"""Scripts that use a run in ways its page does not show: each works, or ends with one line that says what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_run import read_losses, run_script

from hpcjobs.runtime import checkpoints

PAGE = Path(__file__).parents[3] / "docs" / "own_scripts.md"
BEGIN = "import hpcjobs.runtime\nrun = hpcjobs.runtime.start(run_dir='folder')\n"


def test_the_script_of_the_page_runs_alone_and_continues_where_it_ended(tmp_path: Path) -> None:
    """torch.distributed needs an address there too, which no launcher has set."""
    pytest.importorskip("torch")
    listed = re.search(r"```python\n(# train\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert listed is not None
    for steps in ("40", "60"):
        done = run_script(tmp_path, listed[1].replace("STEPS = 100", f"STEPS = {steps}"))
        assert done.returncode == 0, done.stderr
    assert "resumed at step 40" in done.stdout
    assert [step for step, _ in read_losses(tmp_path / "runs" / "train")] == list(range(1, 61))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("run_dir='a-file/run'", 20, "the run folder {folder}/a-file/run can't be made: Not a directory"),
        ("run_dir='a-file'", 20, "the run folder {folder}/a-file can't be made: File exists"),
        ("keep=0", 2, "start(): keep=0, expected a whole number from 1 on"),
        ("steps_apart=0", 2, "start(): steps_apart=0, expected a whole number from 1 on"),
        ("total_steps='all'", 2, "start(): total_steps='all', expected a whole number from 1 on"),
        ("log_to=['paper']", 2, "log_to: 'paper' is no tracker"),
    ],
)
def test_a_start_that_cannot_be_is_one_line_with_its_exit_code(
    tmp_path: Path, arguments: str, code: int, message: str
) -> None:
    (tmp_path / "a-file").write_text("")
    done = run_script(tmp_path, f"import hpcjobs.runtime\nhpcjobs.runtime.start({arguments})")
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: rank 0: {message.format(folder=tmp_path)}")


def test_a_run_folder_may_have_spaces_and_a_newline_in_its_path(tmp_path: Path) -> None:
    text = f"{BEGIN}run.log(1, loss=2.0)\nrun.save(1, {{'a': 1}})\nrun.finish()".replace("'folder'", r"'a b\nc'")
    assert run_script(tmp_path, text).returncode == 0
    assert "resumed at step 1" in run_script(tmp_path, text).stdout


def test_a_state_is_saved_as_it_was_also_where_it_is_no_tensor(tmp_path: Path) -> None:
    """A thread writes it while the program changes arrays and objects that lie beside the tensors."""
    pytest.importorskip("torch")
    text = f"""
import collections, numpy, torch
{BEGIN}
Pair = collections.namedtuple("Pair", "mean count")
arrays, recent = numpy.zeros(2_000_000), collections.deque([torch.zeros(3)])
pair = Pair(torch.zeros(2), 0)
run.save(1, {{"first": torch.ones(5_000_000), "arrays": arrays, "recent": recent, "pair": pair}})
arrays += 1
recent[0] += 1
pair.mean.add_(1)
run.finish()
saved = hpcjobs.runtime.start(run_dir="folder").load()
print(saved["arrays"].max(), saved["recent"][0].max().item(), saved["pair"].mean.max().item(), type(saved["pair"]))
"""
    done = run_script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0.0 0.0 0.0 <class '__main__.Pair'>"


@pytest.mark.parametrize(
    "state",
    [
        "{'weights': torch.ones(2), 'rule': lambda: 1}",
        "{'rule': lambda: 1}",
        "{'file': open(__file__), 'w': torch.ones(1)}",
    ],
)
def test_a_state_that_cannot_be_written_is_refused_by_the_call_itself(tmp_path: Path, state: str) -> None:
    pytest.importorskip("torch")
    save = f"try:\n    run.save(1, {state})\nexcept TypeError as error:\n    print(error)\n"
    done = run_script(tmp_path, f"import torch\n{BEGIN}{save}run.finish()")
    assert (done.returncode, done.stderr) == (0, "")
    assert "save(): the state can't be written: " in done.stdout
    assert not list((tmp_path / "folder" / "checkpoints").glob("*step*"))


def test_the_newest_checkpoint_is_that_of_the_highest_step_whatever_its_digits(tmp_path: Path) -> None:
    text = f"{BEGIN}for step in (99_999_998, 99_999_999, 100_000_000):\n    run.save(step, {{}})\nrun.finish()"
    done = run_script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    names = [place.name for place in checkpoints.steps(tmp_path / "folder" / "checkpoints")]
    assert names == ["step-100000000", "step-99999999"]
    assert "resumed at step 100000000" in run_script(tmp_path, BEGIN).stdout


def test_an_error_is_one_line_also_where_torch_has_put_its_hook_around_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert run_script(tmp_path, f"{BEGIN}run.save(1, {{}}, sharded=True)\nrun.finish()").returncode == 0
    text = f"import torch.distributed as dist\n{BEGIN}dist.init_process_group('gloo')\nrun.load(rank=1)"
    done = run_script(tmp_path, text)
    assert done.returncode == 17
    (line,) = done.stderr.splitlines()
    assert line.endswith("has no part of rank 1: the ranks are 0 to 0")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("run.save(-1, {})", "save(): step is -1, expected 0 or more finished steps"),
        ("run.log(-1, loss=1.0)", "log(): step is -1, expected 0 or more finished steps"),
        ("run.log(1, epoch=float('nan'))\nrun.flush()", "log(): epoch is nan, expected a finite number"),
        ("run.save(1, {}, loss='low')", "save(): loss is a str ('low'), expected a number"),
        ("run.finish()\nrun.save(1, {})", "save() after finish(): the run has ended"),
    ],
)
def test_a_call_with_an_impossible_value_names_it(tmp_path: Path, call: str, message: str) -> None:
    done = run_script(tmp_path, BEGIN + call)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(message)


def test_numbers_of_numpy_and_those_that_are_not_finite_are_logged(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy
    text = f"""
import numpy
{BEGIN}
run.log(numpy.int64(1), loss=numpy.float32(1.5), one=numpy.array([4.0]), count=numpy.int32(3), none=float("inf"))
run.log(2, loss=float("nan"))
run.finish(best=numpy.array([0.5]))
"""
    done = run_script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "folder" / "metrics.jsonl").read_text().splitlines()]
    assert (lines[1]["loss"], lines[1]["metrics"]["one"], lines[1]["metrics"]["count"]) == (1.5, 4.0, 3)
    assert json.loads((tmp_path / "folder" / "summary.json").read_text())["results"] == {
        "one": 4.0, "count": 3, "none": None, "best": 0.5
    }  # fmt: skip


def test_ranks_that_save_their_parts_after_different_steps_are_named_at_once(tmp_path: Path) -> None:
    limit = "from hpcjobs.runtime import signals\nsignals.LAST_SAVE_S = 0.0\n"
    text = f"{limit}{BEGIN}run.save(10 + run.rank, {{'part': run.rank}}, sharded=True)\nrun.finish()"
    done = run_script(tmp_path, text, ranks=2, MASTER_PORT="29611")
    assert done.returncode == 20
    message = "rank 1 has saved step 11 instead: all ranks save after the same steps"
    assert f"error: rank 0: step 10 can't be saved in {tmp_path}/folder/checkpoints: {message}" in done.stderr


def test_names_and_texts_that_are_no_utf_8_or_hold_control_characters_break_no_file(tmp_path: Path) -> None:
    logged = "{'a\\udc80': 1, 'b\\n': 2, '\\x1b[31mc': 3, 'd\\u2028': 4}"
    end = "run.finish(file='weights\\udc80.pt', **{'k\\n': 1})\n"
    done = run_script(tmp_path, f"{BEGIN}run.log(1, loss=1.0, **{logged})\n{end}")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "folder/metrics.jsonl").read_text("utf-8").rstrip("\n").split("\n")
    metrics = {"a\\udc80": 1, "b\n": 2, "\x1b[31mc": 3, "d\u2028": 4}
    assert json.loads(lines[1])["metrics"] == metrics
    results = json.loads((tmp_path / "folder/summary.json").read_text("utf-8"))["results"]
    assert results == {**metrics, "file": "weights\\udc80.pt", "k\n": 1}


@pytest.mark.parametrize("name", ["a\\nb", "\\x1b[31m", "\\udc80"])
def test_a_name_of_a_run_that_no_terminal_prints_is_refused(name: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, f"import hpcjobs.runtime\nhpcjobs.runtime.start(name='{name}')\n")
    assert f"the run's name is '{name}', expected printable text" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
