"""The reader of a job's log, beside jobs of this machine: what it writes, what it costs, what it survives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commandline import ok, within
from interpreters import interpreter
from waiting import eventually

from hpcjobs.packing import pack
from hpcjobs.run.index import entries
from hpcjobs.run.job_files import read_figures, read_rate
from hpcjobs.run.progress import read_progress
from hpcjobs.run.wait import wait
from hpcjobs.scheduler.base import connect

METRIC = r"rate (\S+) it/s"


@pytest.fixture(autouse=True)
def machine(here: Path) -> Iterator[None]:
    """A queue of its own, which is empty again at the end; programs that wait for the file ``go`` end with the test."""
    yield
    (here / "go").touch()
    local = connect("local", None)
    local.cancel({record.job_id for record in local.queue()})
    wait(entries(), timeout_s=300)


def submit(script: str, *options: str, metric: str = METRIC) -> Path:
    """The run folder of a job of this shell script."""
    program = Path("program.sh")
    program.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    answer = ok("submit", "--site", "local", "--metric", metric, *options, "--json", "./program.sh")
    return Path(answer.json["run_dir"])


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_running_job_shows_its_figure_and_leaves_it_in_its_summary() -> None:
    folder = submit('echo "rate 1200 it/s"; until [ -e go ]; do sleep 0.2; done; echo "rate 1300 it/s"')
    eventually(lambda: len(rows(folder)) == 2)
    assert [row["kind"] for row in rows(folder)] == ["run", "figure"]
    (job,) = entries()
    assert "1,200 it/s" in ok("ps").out
    assert "progress: 1,200 it/s" in ok("show", job.job_id).out
    step = read_progress(folder)
    assert step is not None
    assert (step.step.throughput, step.step.unit, step.of_total) == (1200, "it/s", "")  # the SPEED of top
    Path("go").touch()
    assert within("wait", job.job_id).code == 0
    (figure,) = read_figures(folder).items()
    assert figure[0] == "it/s"
    assert (figure[1].value, figure[1].last, figure[1].readings) == (1250, 1300, 2)
    assert read_rate(folder) == ("it/s", 1250, "it/s")
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"


def test_a_program_that_ends_at_once_is_read_to_its_end() -> None:
    for _ in range(5):
        folder = submit('echo "rate 7 it/s"', "--wait")
        assert read_figures(folder)["it/s"].value == 7


def test_a_failed_job_leaves_what_it_printed_before() -> None:
    folder = submit('echo "rate 7 it/s"; exit 3')
    (job,) = entries()
    assert within("wait", job.job_id).code == 3
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"], summary["figures"]["it/s"]["value"]) == ("failed", 3, 7)


def test_a_program_that_writes_a_summary_keeps_it_with_the_figures_added() -> None:
    folder = submit(
        'echo \'{"throughput": {"value": 3, "unit": "x/s"}, "loss": 0.5}\' >"$HPCJOBS_RUN_DIR/summary.json"\n'
        'echo "rate 7 it/s"',
        "--wait",
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["loss"], summary["throughput"]["value"], summary["figures"]["it/s"]["value"]) == (0.5, 3, 7)
    assert read_rate(folder) == ("it/s", 7, "it/s")


def test_a_log_without_the_figure_leaves_no_summary_and_a_word_in_figures_log() -> None:
    folder = submit("echo nothing; echo rate fast it/s", "--wait")
    assert not (folder / "summary.json").exists()
    messages = (folder / "figures.log").read_text()
    assert "'fast' is no number" in messages
    assert "no line of the log has it" not in messages
    assert "no line of the log has it" in (submit("echo nothing", "--wait") / "figures.log").read_text()


def test_a_hostile_log_costs_little_and_is_read_past() -> None:
    """Binary text, a line of 30 MB, and 200,000 values, for a pattern that backtracks and one that does not."""
    script = (
        "head -c 100000 /dev/urandom; head -c 30000000 /dev/zero | tr '\\0' a; echo; "
        "yes 'rate 5 it/s' | head -n 200000; printf 'rate 9 it/s'"
    )
    folder = submit(script, "--metric", "(a+)+[0-9]$; name=evil", "--wait")
    figures = read_figures(folder)
    assert list(figures) == ["it/s"]
    assert (figures["it/s"].median, figures["it/s"].last) == (5, 9)
    assert len(rows(folder)) < 200
    assert (folder / "metrics.jsonl").stat().st_size < 100_000


def test_a_pattern_that_is_slow_for_each_line_costs_no_more_than_its_share() -> None:
    """About 20 ms for each of 2,000 lines, which would keep a core busy for 40 s."""
    script = "yes $(head -c 1990 /dev/zero | tr '\\0' x) | head -n 2000; echo 'rate 9 it/s'"
    folder = submit(script, "--metric", "x.*x.*x.*y([0-9]+); name=slow", "--wait")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["figures"]["it/s"]["value"] == 9
    assert summary.get("log_bytes_not_read", 0) > 1_000_000 or "given up" in (folder / "figures.log").read_text()


def test_a_figure_of_a_project_file_is_read_and_one_of_the_site_can_be_left_out(here: Path) -> None:
    Path("site_configs").mkdir()
    Path("site_configs/mine.yaml").write_text(
        "scheduler: local\nfigures: {site: 'rate (\\S+) it/s', both: {json: x.y, unit: x/s}}\n"
    )
    Path("hpcjobs.yaml").write_text(
        'site: mine\nprogram: [sh, -c, "echo \'rate 3 it/s\'; echo \'{\\"x\\": {\\"y\\": 8}}\'"]\n'
        "figures: {own: {pattern: 'rate (\\d+)', unit: it/s, better: less, take: last}, site: null}\n"
    )
    ok("sites", "trust", "site_configs/mine.yaml")
    ok("submit", "--wait")
    (job,) = entries()
    figures = read_figures(Path(job.run_dir))
    assert {name: (one.value, one.unit) for name, one in figures.items()} == {"own": (3, "it/s"), "both": (8, "x/s")}
    assert next(iter(figures)) == "own"
    assert read_rate(Path(job.run_dir)) == ("own", pytest.approx(1 / 3), "1/(it/s)")


@pytest.mark.parametrize("version", ["3.6", "this"])
def test_the_packed_reader_ends_when_told_and_ignores_signals_for_the_program(tmp_path: Path, version: str) -> None:
    python = sys.executable if version == "this" else interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    program, log = tmp_path / "figures.pyz", tmp_path / "log"
    program.write_bytes(pack("hpcjobs.node.figures"))
    log.write_text("of an earlier attempt: rate 5 it/s\n")
    begin = str(log.stat().st_size)
    rules = json.dumps([{"name": "a", "pattern": "rate ([0-9]+)", "unit": "it/s"}, {"name": "b", "json_path": "x.y"}])
    with log.open("a") as file:
        arguments = [python, "-I", str(program), "job", "2", rules, begin, str(tmp_path)]
        reader = subprocess.Popen(arguments, stdout=file, stderr=subprocess.PIPE, text=True)
        file.write(' 0: rate 7 it/s\r1: {"x": {"y": 2.5}}\n')
        file.flush()
        eventually(lambda: len(rows(tmp_path)) == 3)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            reader.send_signal(number)
        file.write("0: rate 9 it")
        file.flush()
        (tmp_path / ".exit_code").write_text("0")
        reader.send_signal(signal.SIGHUP)
        assert reader.communicate(timeout=60)[1] == ""
    assert reader.returncode == 0
    figures = read_figures(tmp_path)
    assert {name: (one.value, one.readings) for name, one in figures.items()} == {"a": (8, 2), "b": (2.5, 1)}
