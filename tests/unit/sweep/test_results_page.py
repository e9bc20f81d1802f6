"""What a sweep's page shows of its cells, and what it says it leaves out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commandline import ok, within

from hpcjobs.sweeps import results_page
from hpcjobs.sweeps.results import Results
from hpcjobs.sweeps.sweep import find_sweep


def cells(**axes: list[Any]) -> list[dict[str, Any]]:
    """A completed cell for every combination; its loss is least at lr=0.01 and large widths."""
    rows: list[dict[str, Any]] = [{}]
    for name, values in axes.items():
        rows = [{**row, name: value} for row in rows for value in values]
    return [
        row
        | {
            "loss": abs(math.log10(row["lr"] / 0.01)) + 1 / row.get("width", 1),
            "state": "COMPLETED", "elapsed_s": 2.0, "nodes": "n1", "job_id": f"7_{n}", "cell": f"c{n}", "folder": "/c",
        }
        for n, row in enumerate(rows)
    ]  # fmt: skip


def write_page(rows: list[dict[str, Any]], params: list[str], folder: Path, *, largest: bool = False) -> list[Path]:
    """The page of a sweep over ``params`` that measured a loss."""
    ranked = Results(params, ["loss"], rows).rank("loss", largest=largest)
    return results_page.write("s", rows, params, folder, compared=ranked, metric="loss", largest=largest)


@pytest.mark.parametrize(
    ("axes", "drawn"),
    [
        ({"lr": [0.1, 0.01]}, ["effect"]),
        ({"lr": [0.1, 0.01, 0.001], "width": [8, 16]}, ["heatmap", "parallel"]),
        ({"lr": [0.1, 0.01], "width": [8, 16], "act": ["relu", "<b>gelu</b>"]}, ["parallel"]),
        ({"lr": [0.1]}, []),
    ],
    ids=["one", "two", "three", "none"],
)
def test_pictures_are_those_that_fit_what_varies(axes: dict[str, list[Any]], drawn: list[str], tmp_path: Path) -> None:
    rows = cells(**axes)
    written = write_page(rows, list(axes), tmp_path)
    assert sorted(path.stem for path in written if path.suffix == ".png") == drawn
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == len(drawn)
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<b>gelu" not in page
    least = min(rows, key=lambda row: float(row["loss"]))
    assert f"lr {least['lr']:g}" in page
    assert f"(job {least['job_id']})" in page


def test_what_is_not_compared_is_counted_and_every_row_is_in_the_files(tmp_path: Path) -> None:
    rows = cells(lr=[0.1, 0.01, 0.001])
    rows[1] |= {"state": "FAILED", "loss": None}
    rows[2]["loss"] = None
    write_page(rows, ["lr"], tmp_path, largest=True)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Not compared: 1 cell FAILED" in page
    assert "1 cell completed without a finite value of loss" in page
    frame = pl.read_parquet(tmp_path / "results.parquet")
    assert frame["lr"].to_list() == [0.1, 0.01, 0.001]
    assert pl.read_csv(tmp_path / "results.csv").shape == frame.shape


@pytest.mark.parametrize("largest", [False, True], ids=["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_finite_number_is_never_the_best(value: float, largest: bool, tmp_path: Path) -> None:
    """The page and the table of the terminal name the same cell."""
    rows = cells(lr=[0.1, 0.01, 0.001])
    rows[0]["loss"] = value
    best = Results(["lr"], ["loss"], rows).best("loss", largest=largest)
    assert best is not None
    assert best["job_id"] != "7_0"
    written = write_page(rows, ["lr"], tmp_path, largest=largest)
    page = written[0].read_text(encoding="utf-8")
    assert f"(job {best['job_id']})" in page
    assert "1 cell completed without a finite value of loss" in page


def test_the_command_names_the_best_cell_of_a_sweep_that_ran() -> None:
    program = 'echo "{\\"loss\\": {lr}}" >"$HPCJOBS_RUN_DIR/summary.json"'
    ok("sweep", "--site", "local", "--name", "try", "--set", "lr=0.5,0.25", "--wait", "bash", "-c", program)
    assert "0.25" in ok("report", "sweep", "try", "--min", "loss").out
    document = ok("report", "sweep", "try", "--json").json
    assert (document["best"]["params"]["lr"], document["page"]) == (0.25, "try-report/index.html")
    assert Path(document["page"]).is_file()
    wrong = within("report", "sweep", "try", "--min", "lose")
    assert wrong.code != 0
    assert "'lose'" in wrong.err
    assert "loss" in wrong.err


@pytest.mark.parametrize("odd", [math.inf, math.nan, 10**400, 1e300])
def test_a_value_that_no_axis_can_show_is_on_the_page_as_it_is(odd: float, tmp_path: Path) -> None:
    rows = cells(lr=[0.1, 0.01], limit=[odd, 1.0])
    write_page(rows, ["lr", "limit"], tmp_path)
    assert results_page.cell(odd) in (tmp_path / "index.html").read_text()
    assert pl.read_csv(tmp_path / "results.csv", infer_schema=False).height == 4
    assert pl.read_parquet(tmp_path / "results.parquet").height == 4


def test_a_long_value_is_broken_into_lines(tmp_path: Path) -> None:
    write_page(cells(lr=[0.1, 0.01], text=["x" * 600, "y"]), ["lr", "text"], tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "x" * 600 in page
    assert "overflow-wrap: break-word" in page.partition("</style>")[0]


@pytest.mark.parametrize("name", ["val_loss", "evaluation.loss", "eval/loss", "last.validation_loss"])
def test_cells_are_compared_by_the_loss_of_data_that_was_not_trained_on(name: str) -> None:
    assert Results(["lr"], ["loss", "train_loss", name], []).loss == name
    assert Results(["lr"], ["loss", "train_loss", "interval"], []).loss == "loss"


def test_cells_are_compared_by_the_validation_loss_that_a_script_logs(here: Path) -> None:
    (here / "train.py").write_text(
        "import argparse\n"
        "from hpcjobs.runtime import start\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float)\n"
        "lr = parser.parse_args().lr\n"
        "run = start()\n"
        "run.log(1, loss=lr, val_loss=9.0)\n"
        "run.log(2, loss=lr, val_loss=1 - lr)\n"
        "run.finish()\n"
    )
    local = ("--site", "local", "--launcher", "spawn")
    ok("sweep", "run", *local, "--name", "s", "--wait", "--set", "lr=0.1,0.9", "train.py")
    table = find_sweep("s").table()
    assert table.usual_metric == ("results.val_loss", False)
    assert [row["lr"] for row in table.rank(table.loss)] == [0.9, 0.1]
    assert "RESULTS.VAL_LOSS" in ok("sweep", "results", "s").out
