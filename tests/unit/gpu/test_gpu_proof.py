"""`make gpu`: its steps, its report and its rehearsal on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))


def prove(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(REPOSITORY / "tools/gpu"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)


def steps_of(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["machine"]["rehearsal"] is True
    return {step["name"]: step for step in report["steps"]}


def test_the_help_says_what_it_does_how_long_it_takes_and_what_its_exit_codes_mean() -> None:
    answer = prove("--help")
    assert answer.returncode == 0
    for arguments in ("--rehearse", "--only", "less than ten minutes", "Exit code: 0", "gpu-report"):
        assert arguments in answer.stdout


def test_without_a_gpu_it_says_so_and_names_the_rehearsal() -> None:
    answer = prove()
    assert answer.returncode == 2
    assert "sees no GPU here" in answer.stderr
    assert "--rehearse" in answer.stderr


def test_an_unknown_step_is_refused_with_the_names_of_all() -> None:
    answer = prove("--rehearse", "--only", "speed")
    assert answer.returncode == 2
    assert "no step 'speed'; there are horovod, losses-ddp, " in answer.stderr


def test_a_rehearsal_trains_names_an_error_and_writes_the_report(tmp_path: Path) -> None:
    answer = prove("--rehearse", "--out", str(tmp_path), "--only", "losses-ddp", "no-device")
    assert answer.returncode == 0, (answer.stdout, answer.stderr)
    steps = steps_of(tmp_path)
    assert {name: step["verdict"] for name, step in steps.items()} == dict.fromkeys(steps, "passed")
    assert list(steps) == ["losses-ddp", "no-device"]
    assert steps["losses-ddp"]["figures"]["losses"] == pytest.approx(steps["losses-ddp"]["figures"]["cpu_losses"])
    assert steps["no-device"]["figures"]["code"] == 23
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "nothing here was measured on a GPU" in page
    assert "| losses-ddp | passed | largest_deviation 0" in page
    assert (tmp_path / "losses.png").stat().st_size > 1000


@pytest.mark.long
def test_every_step_rehearses_on_the_cpu(tmp_path: Path) -> None:
    answer = prove("--rehearse", "--out", str(tmp_path))
    assert answer.returncode == 0, (answer.stdout, answer.stderr)
    assert "failed" not in {step["verdict"] for step in steps_of(tmp_path).values()}


def test_a_step_that_fails_ends_no_other_and_the_exit_code_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu.__main__ as proof
    from gpu.steps import CannotRun, Step

    def lack(bench: object) -> dict[str, object]:
        raise CannotRun("no nvcc in PATH")

    def good(figures: object) -> Iterator[str]:
        yield from ()

    steps = (
        Step("broken", "raises", lambda bench: {"x": 1 / 0}, good),
        Step("wrong", "measures what it should not", lambda bench: {"code": 1}, lambda figures: ["1 is not 0"]),
        Step("lacking", "needs a compiler", lack, good),
        Step("sound", "passes", lambda bench: {"code": 0}, good),
    )
    monkeypatch.setattr(proof, "STEPS", steps)
    assert proof.main(["--rehearse", "--out", str(tmp_path)]) == 1
    verdicts = {name: (step["verdict"], step["problems"]) for name, step in steps_of(tmp_path).items()}
    assert verdicts == {
        "broken": ("failed", ["ZeroDivisionError: division by zero"]),
        "wrong": ("failed", ["1 is not 0"]),
        "lacking": ("not run", ["no nvcc in PATH"]),
        "sound": ("passed", []),
    }
    assert "failed: broken, wrong" in capsys.readouterr().out
    monkeypatch.setattr(proof, "STEPS", steps[2:])
    assert proof.main(["--rehearse", "--out", str(tmp_path)]) == 0


def test_what_is_out_of_tolerance_is_named() -> None:
    from gpu import speed, training

    def losses(off: float) -> list[str]:
        return list(training.check_losses({"largest_deviation": off, "tolerance": 1e-3}))

    assert losses(1e-4) == []
    assert losses(2e-3) == ["losses differ from the CPU's by up to 0.002, not 0.001"]
    assert len(losses(math.nan)) == 1
    memory = {"judged": True, "shards_bytes": 2e9, "expected_at_most_bytes": 3e9}
    assert list(training.check_memory({**memory, "peak_bytes": 2.5e9})) == []
    assert len(list(training.check_memory({**memory, "peak_bytes": 3.1e9}))) == 1
    assert len(list(training.check_memory({**memory, "peak_bytes": 1.0e9}))) == 1
    resumed = {"killed_with": 137, "resumed_from_step": 16, "steps": 60, "expected_steps": 60, "tolerance": 1e-3}
    assert list(training.check_resumed({**resumed, "largest_deviation": 0.0})) == []
    assert len(list(training.check_resumed({**resumed, "largest_deviation": 0.1, "resumed_from_step": None}))) == 2
    assert list(speed.check_speed({"of_plain": 0.96, "least_of_plain": 0.95})) == []
    assert len(list(speed.check_speed({"of_plain": 0.9, "least_of_plain": 0.95}))) == 1
    assert len(list(speed.check_product({"of_cublas": 0.69, "least_of_cublas": 0.7}))) == 1
    assert list(speed.check_product({"of_cublas": None, "least_of_cublas": 0.7})) == []
    assert len(list(speed.check_horovod({"device": "cuda", "nccl": False}))) == 1
