"""A loss that is NaN or infinite: its files stay JSON, and everything that shows the run says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from commandline import ok

import hpcjobs
from hpcjobs.record.summary import RunSummary
from hpcjobs.record.values import encode_object, restore
from hpcjobs.run.progress import newest_step

SCRIPT = """\
import hpcjobs.runtime

run = hpcjobs.runtime.start()
for step in range(1, 7):
    run.log(step, loss=1 / step if step < 4 else float("nan"), norm=float("inf") if step == 2 else 0.5)
run.finish(loss=float("nan"), parts={"a.b": [1.0, float("-inf")]})
"""


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run_dir(here: Path) -> Path:
    """The run folder of a script whose loss diverges at step 4, and which goes on to its end."""
    (here / "train.py").write_text(SCRIPT)
    ok("submit", "--site", "local", "--name", "diverged", "--wait", "train.py")
    return next((here / "runs").glob("diverged-*"))


def test_metrics_and_summary_of_a_run_that_diverged_are_json_and_keep_what_the_numbers_were(run_dir: Path) -> None:
    lines = [strict(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["loss"] for step in steps] == [1.0, 0.5, 1 / 3, None, None, None]
    assert [step.get("not_finite") for step in steps[:4]] == [None, {"metrics.norm": "Infinity"}, None, {"loss": "NaN"}]
    summary = strict((run_dir / "summary.json").read_text())
    assert summary["loss"] is None
    assert summary["not_finite"]["results.parts.a.b.1"] == "-Infinity"
    assert math.isnan(RunSummary.read(run_dir).loss or 0.0)
    job = hpcjobs.find("diverged")
    read = [line for line in job.metrics() if line["kind"] == "step"]
    assert read[1]["metrics"]["norm"] == math.inf
    assert math.isnan(read[-1]["loss"])
    recorded = job.summary()
    assert recorded is not None
    assert recorded["results"]["parts"] == {"a.b": [1.0, -math.inf]}


def test_why_and_show_say_since_which_step_the_loss_is_none(run_dir: Path) -> None:
    assert "it has not failed\nwarning: loss NaN since step 4 (metrics.jsonl)\n" in ok("why", "diverged").out
    assert "  loss: nan\n" in ok("show", "diverged").out
    strict(ok("show", "diverged", "--json").out)
    assert str(newest_step(run_dir)).endswith("loss NaN since step 4")


def test_lines_without_a_loss_say_nothing_of_when_it_diverged(here: Path) -> None:
    script = SCRIPT.replace("run.finish", "    run.log(step, accuracy=0.5)\nrun.log(7, loss=float('nan'))\nrun.finish")
    (here / "train.py").write_text(script)
    ok("submit", "--site", "local", "--name", "validated", "--wait", "train.py")
    assert str(newest_step(next((here / "runs").glob("validated-*")))) == "step 7, loss NaN since step 4"


def test_a_result_that_is_named_as_the_list_of_these_numbers_is_kept() -> None:
    assert restore(strict(encode_object({"not_finite": 3, "loss": math.nan}))) == {"not_finite": 3, "loss": None}


@pytest.mark.parametrize(
    "value",
    [
        {"a": math.nan, "b": None},
        {"a.b": {"c": [1, {"d": math.inf}]}, "a": {"b.c": -math.inf}},
        {"é": [[math.inf]]},
        {"not_finite": 3, "a": 0.5},
        {"not_finite": {"a": 3}},
    ],
)
def test_numbers_that_json_does_not_have_come_back_as_they_were(value: dict[str, Any]) -> None:
    assert repr(restore(strict(encode_object(value)))) == repr(value)
