"""Recorded logs of five programs that know nothing of hpcjobs, through a sweep, a study and a comparison of studies.

The program of each test prints a recorded log, with the numbers of its figure changed as its size and its parameters
would change them. The queue is that of this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok, within
from waiting import eventually

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.run.index import entries
from hpcjobs.run.wait import wait
from hpcjobs.scheduler.base import connect

LOGS = Path(__file__).parents[2] / "data" / "program_logs"
REPLAY = """
import os, re, sys
log, factor = sys.argv[1], float(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if os.environ.get("RANK", "0") == "0":
    scale = factor * ranks * (1 + 0.01 * int(os.environ.get("REPEAT", "0")))
    text = open(log, encoding="utf-8", newline="").read()
    change = lambda match: match[1] + format(float(match[2]) * (1 / scale if sys.argv[4] == "less" else scale), ".6g")
    sys.stdout.write(re.sub(sys.argv[3], change, text, flags=re.MULTILINE))
"""
PROGRAMS = {
    # What is changed is found by other patterns than those of the presets.
    "lammps": ("timesteps/s", 201.085, "more", r"(tau/day, )([\d.]+)"),
    "gromacs": ("ns/day", 116.758, "more", r"(^Performance: +)([\d.]+)"),
    "hpl": ("Gflops", 229.96, "more", r"(72\.06 +)([\d.e+]+)"),
    "nanogpt": ("iteration", 18.84, "less", r"(time )([\d.]+)"),
    "huggingface": ("samples/s", 96.925, "more", r"('train_samples_per_second': )([\d.]+)"),
}


@pytest.fixture(autouse=True)
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two CPUs with a queue of its own, which is empty again at the end."""
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "2")
    (here / "replay.py").write_text(REPLAY, encoding="utf-8")
    yield
    local = connect("local", None)
    local.cancel({record.job_id.partition("_")[0] for record in local.queue()})
    wait(entries(), timeout_s=300)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_measured_by_what_it_prints(program: str, here: Path) -> None:
    figure, value, better, pattern = PROGRAMS[program]
    arguments = [str(LOGS / f"{program}.log"), "{factor}", pattern, better]
    common = ("--site", "local", "--metric", program, "--no-check")

    ok("sweep", "run", *common, "--name", "s", "--set", "factor=1,2", "--wait", "replay.py", *arguments)
    best = ok("sweep", "results", "s", "--min" if better == "less" else "--max", figure, "--json").json
    assert best["params"] == {"factor": 2}
    assert best["measured"][figure] == pytest.approx(value / 2 if better == "less" else value * 2, rel=1e-4)

    assert ok("report", "sweep", "s", "--json").json["best"]["params"] == {"factor": 2}

    for study, factor in (("before", "1"), ("after", "1.5")):
        arguments_of_study = [factor if argument == "{factor}" else argument for argument in arguments]
        sizes = ("--ntasks-per-node", "1,2", "--repeats", "2", "--name", study)
        ok("scale", *common, *sizes, "--wait", "replay.py", *arguments_of_study)
    junit = here / "checks.xml"
    answer = within(
        "report", "scaling", "after", "--baseline", "before", "--junit", str(junit), "--json",
        "--check", "efficiency>=0.95 at 2", "--check", "speedup>=3 at 2",
    )  # fmt: skip
    assert answer.code == 1
    groups = json.loads(answer.out)["groups"]
    rate = 1000 / value if better == "less" else value
    assert [group["throughput"]["value"] for group in groups] == pytest.approx([1.5 * rate, 3 * rate], rel=0.03)
    assert 'failures="1"' in junit.read_text(encoding="utf-8")
    report = Path("after-report/report.md").read_text(encoding="utf-8")
    assert "Comparison with before" in report
    assert re.search(r"\| 1x1 \|.*\| 1\.50", report)
    assert "of whole jobs" not in report


def test_a_rate_in_the_log_of_a_program_that_is_measured_by_its_time_is_named_with_its_flag(here: Path) -> None:
    program = ("sh", "-c", "sleep 2; echo 'step 10: 1234.5 tokens/s (loss 2.1)'")
    ok("scale", "--site", "local", "--repeats", "1", "--name", "t", "--wait", "--no-check", *program)
    eventually(lambda: within("report", "scaling", "t").code == 0)  # the queue's record is later than the job's end
    answer = within("report", "scaling", "t")
    assert "of whole jobs" in answer.err
    assert "--metric '([0-9.,]+) tokens/s'" in " ".join(answer.err.split())
    ok("scale", "--site", "local", "--repeats", "1", "--name", "u", "--metric", "([0-9.,]+) tokens/s", "--wait",
       "--no-check", *program)  # fmt: skip
    eventually(lambda: within("report", "scaling", "u").code == 0)
    (group,) = ok("report", "scaling", "u", "--json").json["groups"]
    assert group["throughput"]["value"] == pytest.approx(1234.5)


def test_a_figure_that_cannot_be_read_is_said_wherever_somebody_waits_for_it() -> None:
    program = ("--metric", r"rate (\S+)", "sh", "-c", "echo rate 1234,5 it/s")
    problem = "figure rate: '1234,5' is no number"
    assert problem in " ".join(ok("submit", "--site", "local", "--wait", *program).err.split())
    ok("scale", "--site", "local", "--repeats", "2", "--name", "v", "--wait", "--no-check", *program)
    refused = within("report", "scaling", "v")
    assert refused.code != 0
    assert problem in " ".join(refused.err.split())
    tried = within("submit", "--site", "local", "-t", "1h", "--ntasks-per-node", "auto", *program)
    assert tried.code != 0
    assert problem in " ".join(tried.err.split())


def test_a_study_over_an_axis_in_python_has_its_series_in_the_table() -> None:
    program = ["sh", "-c", "echo rate $(({factor} * {ranks} * 100)) it/s"]
    study = hpcjobs.scale(
        program, [(1, 1), (1, 2)], site="local", name="p", repeats=2, metric=r"rate (\S+)", over={"factor": [1, 3]}
    )
    study.submit()
    study.wait(timeout_s=300)
    results = study.results()
    assert results[["series", "ranks", "throughput", "unit"]].to_numpy().tolist() == [
        ["factor=1", 1, pytest.approx(100), "it/s"], ["factor=1", 2, pytest.approx(200), "it/s"],
        ["factor=3", 1, pytest.approx(300), "it/s"], ["factor=3", 2, pytest.approx(600), "it/s"],
    ]  # fmt: skip
    assert "factor=3" in study.report().read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="several series: factor=1; factor=3"):
        study.largest_efficient()


def test_a_study_over_an_axis_has_a_matrix_and_a_fit_of_each_series(here: Path) -> None:
    """Two threads make this program 1.8 times as fast, two ranks twice."""
    script = 'echo "rate $((1000 * {ranks} * (5 + 4 * (OMP_NUM_THREADS - 1)) / 5)) it/s"'
    ok("scale", "--site", "local", "--over", "cpus-per-task=1,2", "--over", "mode=a,b", "--repeats", "2", "--name", "m",
       "--metric", r"rate (\S+) it/s", "--wait", "--no-check", "sh", "-c", f"{script} # {{mode}}")  # fmt: skip
    out = ok("report", "scaling", "m", "--check", "throughput>=900 at 1").out
    names = ["cpus_per_task=1, mode=a", "cpus_per_task=1, mode=b", "cpus_per_task=2, mode=a", "cpus_per_task=2, mode=b"]
    matrix = [line.split("  ") for line in out.splitlines() if line.startswith(tuple(names)) and "it/s" in line]
    assert [line[0].strip() for line in matrix] == names
    assert ["1,000" in line for line in map(" ".join, matrix)] == [True, True, False, False]
    assert ["1,800" in line for line in map(" ".join, matrix)] == [False, False, True, True]
    assert out.count("compared with cpus_per_task=1, mode=a") == 3
    assert out.count("held: cpus_per_task=") == 4
    document = ok("report", "scaling", "m", "--json").json
    assert [one["series"] for one in document["series"]] == names
    folder = Path("m-report")
    assert (folder / "comparison.svg").exists()
    assert len(list(folder.glob("*/index.html"))) == 4


def test_an_axis_that_is_no_option_and_has_no_place_in_the_program_is_refused() -> None:
    answer = within("scale", "--site", "local", "--over", "thread=1,2", "true")
    assert answer.code != 0
    assert "axis thread: no option of a job has this name" in " ".join(answer.err.split())
