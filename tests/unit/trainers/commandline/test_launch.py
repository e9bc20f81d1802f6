"""Before torch is loaded: help, flags, and the refusal of a world that was not asked for."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcjobs import trainers

from ..conftest import World, clean_environment

BLOCKED = ("typer", "rich", "pydantic", "jinja2", "yaml", "submitit", "msgspec", "pandas")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", trainers.NAMES)
def test_help_is_shown_without_loading_torch(name: str) -> None:
    code = f"""
import sys
from hpcjobs import trainers
try:
    trainers.run({name!r}, ["--help"])
finally:
    print("loaded", sorted({{"torch", "numpy", "lightning"}} & sys.modules.keys()))
"""
    done = python(code)
    assert done.returncode == 0
    assert "--batch-size" in done.stdout
    assert done.stdout.endswith("loaded []\n")


def test_the_node_side_imports_with_every_package_of_the_submit_side_blocked() -> None:
    code = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
import hpcjobs.runtime.dist, hpcjobs.runtime.exits, hpcjobs.record.summary
import hpcjobs.trainers.config, hpcjobs.trainers.loop, hpcjobs.trainers.ddp
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epoch", "3"], "unknown argument '--epoch'. Hint: did you mean --epochs?"),
        (["--batch-size", "0"], "argument --batch-size: 0 is not more than 0"),
        (["--lr", "fast"], "argument --lr: 'fast' is not a number"),
        (["--precision", "fp8"], "invalid choice: 'fp8'"),
    ],
)
def test_a_wrong_flag_is_answered_by_one_line_and_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainers.run("ddp", flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_only_rank_0_tells_of_a_wrong_flag(world: World) -> None:
    ended = world(2, "ddp", "--stepz", "1")
    assert ended.codes == [2, 2]
    assert len(ended.complaints) == 1


def test_a_world_other_than_the_one_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCJOBS_NTASKS", "8")
    assert trainers.run("ddp") == 10
    assert "asked for 8 ranks (HPCJOBS_NTASKS), but the world that started has 1" in capsys.readouterr().err


def test_an_unknown_trainer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no trainer is called 'dpp': there are .*ddp"):
        trainers.run("dpp")


@pytest.mark.parametrize(("flags", "trains"), [(("--steps", "1"), True), (("--data", "nowhere"), False)])
def test_pythons_collector_is_off_while_torch_is_loaded_and_is_left_as_it_was(
    flags: tuple[str, ...], trains: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hpcjobs.trainers import launch, loop

    run_loop, load = loop.run_loop, launch.resolve_name
    loading, collecting, holding = [], [], []

    def loaded(dotted: str) -> Any:
        loading.append(gc.isenabled())
        return load(dotted)

    def watched(*given: Any) -> None:
        collecting.append(gc.isenabled())
        holding.append(gc.get_freeze_count())
        run_loop(*given)

    monkeypatch.setattr(launch, "resolve_name", loaded)
    monkeypatch.setattr(loop, "run_loop", watched)
    monkeypatch.chdir(tmp_path)
    code = trainers.run("ddp", ["--workload", "mnist", *flags])
    assert (code == 0) is trains
    assert loading[:2] == [False, False]  # the loop and the strategy, which load torch
    assert collecting == [True] * trains
    assert all(objects > 100_000 for objects in holding)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("flags", "closed"),
    [(["--lr", "fast"], "stdout"), (["--lr", "fast"], "both"), (["--workload", "nobodys"], "stderr")],
)
def test_the_exit_code_says_why_a_rank_failed_also_where_nobody_reads_what_it_prints(
    tmp_path: Path, flags: list[str], closed: str
) -> None:
    read, write = os.pipe()
    os.close(read)
    code = f"print('held back'); from hpcjobs import trainers; import sys; sys.exit(trainers.run('ddp', {flags!r}))"
    env = {**clean_environment(), "PYTHONUNBUFFERED": ""}
    streams = {name: write if closed in (name, "both") else subprocess.DEVNULL for name in ("stdout", "stderr")}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, **streams, check=False)
    os.close(write)
    assert done.returncode == 2
