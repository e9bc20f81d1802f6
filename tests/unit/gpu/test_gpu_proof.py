"""`make gpu`: its steps, its report and its rehearsal on the CPU."""

from __future__ import annotations

import errno
import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

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
    for arguments in ("--rehearse", "--only", "at most ten minutes", "Exit code: 0", "gpu-report"):
        assert arguments in answer.stdout


def test_without_a_gpu_it_says_so_and_names_the_rehearsal() -> None:
    answer = prove()
    assert answer.returncode == 2
    assert "sees no GPU here" in answer.stderr
    assert "--rehearse" in answer.stderr


def test_an_unknown_step_is_refused_with_the_names_of_all() -> None:
    answer = prove("--rehearse", "--only", "speed")
    assert answer.returncode == 2
    assert "no step 'speed'; there are losses-ddp, " in answer.stderr


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
    assert "2 passed, 0 failed, 0 not run." in page
    row = next(line for line in page.splitlines() if line.startswith("| losses-ddp |"))
    assert "| passed | losses differ by at most 0 (allowed: 0.001) |" in row
    assert "exit code 23; error: the job has GPUs" in page
    assert "![losses](losses.png)" in page
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


def pass_all(figures: object) -> Iterator[str]:
    yield from ()


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_step_that_hangs_takes_no_more_than_the_minutes_and_the_report_names_what_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu.__main__ as proof
    from gpu.bench import Bench
    from gpu.steps import Step

    def hang(bench: Bench) -> dict[str, object]:
        bench.run("hang", ["sleep", "600"], limit_s=300.0)
        return {}

    steps = (
        Step("sound", "passes", lambda bench: {"code": 0}, pass_all),
        Step("hanging", "does not end", hang, pass_all),
        Step("last", "has no time", lambda bench: {"code": 0}, pass_all),
    )
    monkeypatch.setattr(proof, "STEPS", steps)
    assert proof.main(["--rehearse", "--out", str(tmp_path), "--minutes", "0.03"]) == 0
    outcomes = steps_of(tmp_path)
    assert [step["verdict"] for step in outcomes.values()] == ["passed", "not run", "not run"]
    assert "left of 0.03 minutes" in outcomes["hanging"]["problems"][0]
    assert "0.03 minutes are over" in outcomes["last"]["problems"][0]
    assert "not run: hanging, last" in capsys.readouterr().out


def test_a_trainer_that_hangs_before_it_is_to_be_killed_is_ended_at_the_steps_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import bench as benches

    start, started = benches.start, []

    def start_sleep(argv: object, log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        started.append(start(["sleep", "600"], log, env))
        return started[-1]

    monkeypatch.setattr(benches, "start", start_sleep)
    monkeypatch.setattr(benches, "STEP_LIMIT_S", 0.3)
    bench = benches.Bench(tmp_path, "cpu", 1, rehearse=True)
    with pytest.raises(TimeoutError, match="step 4"):
        bench.train("killed", "fsdp", kill_at_step=4)
    assert [process.poll() is not None for process in started] == [True]


STOPPED = """
import sys
sys.path.insert(0, "benchmarks")
import gpu.__main__ as proof
from gpu.steps import Step

def hang(bench):
    bench.run("hang", ["bash", "-c", "echo $$; exec sleep 600"], limit_s=300.0)

proof.STEPS = (Step("first", "passes", lambda bench: {"code": 0}, lambda figures: ()), Step("hang", "", hang, None))
proof.stop_on_signals()
sys.exit(proof.main(["--rehearse", "--out", sys.argv[1]]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_one_who_is_told_to_stop_leaves_no_process_and_a_report_of_what_was_done(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    log = tmp_path / "runs/hang.log"
    proof = subprocess.Popen([sys.executable, "-c", STOPPED, str(tmp_path)], cwd=REPOSITORY)
    try:
        eventually(lambda: log.exists() and len(log.read_text().splitlines()) == 2, timeout_s=120)
        pid = int(log.read_text().splitlines()[-1])
        proof.send_signal(number)
        assert proof.wait(60) == code
    finally:
        proof.kill()
        proof.wait()
    assert not is_running(pid)
    assert list(steps_of(tmp_path)) == ["first"]


def test_a_full_disk_ends_no_step_and_keeps_the_report_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu.__main__ as proof
    from gpu import report
    from gpu.steps import Step

    write, seen = report.write_beside, []

    def fill_disk(path: Path, text: str, **options: Any) -> None:
        if seen:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text, **options)

    def fill(bench: object) -> dict[str, object]:
        seen.append(True)
        return {"code": 0}

    monkeypatch.setattr(report, "write_beside", fill_disk)
    steps = (Step("sound", "passes", lambda bench: {"code": 0}, pass_all), Step("filling", "fills", fill, pass_all))
    monkeypatch.setattr(proof, "STEPS", steps)
    assert proof.main(["--rehearse", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "filling                  passed" in printed
    assert "No space left on device" in printed
    assert list(steps_of(tmp_path)) == ["sound"]


def test_a_check_of_the_node_that_measured_no_gpu_is_no_proof() -> None:
    from gpu import speed

    notes = ["GPUs not measured: did not end in 50 s"]
    figures = {"code": 0, "table": "", "device": "cuda", "report": {"gpus": [], "notes": notes}}
    assert list(speed.check_fabric(figures)) == ["no GPU was measured: GPUs not measured: did not end in 50 s"]
    assert list(speed.check_fabric({**figures, "device": "cpu"})) == []
    assert list(speed.check_fabric({**figures, "report": {"gpus": [{"index": 0}], "notes": []}})) == []


def test_a_product_that_nothing_was_compared_with_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from gpu import speed
    from gpu.bench import Bench
    from gpu.steps import run_step

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def measure(name: str, flags: tuple[str, ...], bench: Bench) -> float:
        if "blas" in name:
            raise speed.BuiltWithoutCublas
        return 12_345.0

    monkeypatch.setattr(speed, "measure_product", measure)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    outcome = run_step(speed.PROGRAMS[-1], Bench(tmp_path, "cuda", 1, rehearse=False))
    assert (outcome.name, outcome.verdict) == ("matmul", "not run")
    assert "built without cuBLAS, so its 12,345 GFLOP/s" in outcome.problems[0]


def test_the_report_says_in_words_what_each_step_measured() -> None:
    from gpu.report import format_figures
    from gpu.steps import Outcome

    gpu = {"index": 0, "name": "NVIDIA L4", "flops": 9.1e13, "memory_bytes_per_s": 2.5e11}
    figures: dict[str, dict[str, Any]] = {
        "speed": {"of_plain": 0.97, "least_of_plain": 0.95, "throughput": 1234.5, "unit": "images/s", "mfu": 0.415},
        "matmul": {"gflops": {"tiled": 15_000.0, "blas": 18_000.0}, "of_cublas": 0.83, "of_cublas_bf16": None},
        "fabric": {"report": {"nodes": [{"host": "n1", "verdict": "good"}], "gpus": [gpu]}},
        "horovod": {"nccl": False, "mpi": True, "gloo": True},
        "memory": {"peak_bytes": 2.5e9, "judged": True, "expected_at_most_bytes": 3e9},
    }
    assert {name: format_figures(Outcome(name, "", "passed", 1.0, one)) for name, one in figures.items()} == {
        "speed": "0.97 of the plain loop's speed; 1234 images/s; MFU 0.41",
        "matmul": "tiled 15,000 GFLOP/s; blas 18,000 GFLOP/s; 0.83 of cuBLAS in fp32",
        "fabric": "n1: good; GPU 0 (NVIDIA L4): 91 TFLOP/s in bf16 or fp16, memory 250 GB/s",
        "horovod": "built with MPI and Gloo",
        "memory": "peak 2.5 GB; expected at most 3 GB",
    }


@pytest.mark.parametrize(("rehearse", "limit_s"), [(False, 240.0), (True, 1200.0)])
def test_a_rehearsal_on_a_busy_cpu_is_not_ended_by_the_limits_for_gpus(
    rehearse: bool, limit_s: float, tmp_path: Path
) -> None:
    from gpu.bench import Bench

    with Bench(tmp_path, "cpu", 1, rehearse=rehearse).limit(240.0) as given_s:
        assert given_s == limit_s


def test_a_driver_that_is_too_old_is_named_where_no_step_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu.__main__ as proof
    import torch

    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", fail)
    problem = proof.explain_no_gpu()
    assert problem is not None
    assert "found version 11040" in problem


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
