"""The tables of the public Python interface: columns with units, a sentence where a package is missing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import hpcjobs
from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.jobstats.columns import COLUMNS, parse_moment, unit_of
from hpcjobs.scaling import handle
from hpcjobs.sweeps import results

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare_packages(tmp_path: Path) -> Path:
    """The installed packages without those of the extra `report`."""
    folder = tmp_path / "packages"
    folder.mkdir()
    absent = ("pandas", "polars", "_polars", "matplotlib", "scipy", "hpcjobs", "__editable", "_hpcjobs")
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if not one.name.startswith(absent):
            (folder / one.name).symlink_to(one)
    return folder


def test_without_numpy_alone_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setattr("hpcjobs.errors.find_spec", lambda name: None if name == "numpy" else name)
    for table in (hpcjobs.accounting, hpcjobs.scale("work.py", [1], site="local").results):
        with pytest.raises(HpcJobsError, match="needs numpy"):
            table()


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("hpcjobs.accounting(site='local')", "hpcjobs.accounting() needs pandas and polars"),
        ("hpcjobs.scale(['true'], [1], site='local').results()", "a study needs pandas and polars and scipy"),
        ("hpcjobs.scale(['true'], [1], site='local').runs()", "needs pandas and polars"),
        ("hpcjobs.sweep(['true'], [{}], site='local').results()", "a DataFrame needs pandas"),
    ],
)
def test_without_the_extra_a_sentence_names_it(call: str, missing: str, bare_packages: Path, here: Path) -> None:
    program = f"import hpcjobs\ntry:\n    {call}\nexcept hpcjobs.errors.HpcJobsError as error:\n    print(error)"
    program = program.replace("import hpcjobs", "import hpcjobs, hpcjobs.errors", 1)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{bare_packages}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert missing in done.stdout
    assert "pip install 'hpcjobs[report]'" in done.stdout


def test_jobs_that_ran_here_are_a_table_whose_columns_say_their_units(here: Path) -> None:
    job = hpcjobs.submit(hpcjobs.plan(["true"], site="local", name="first"))
    assert job.wait() == 0
    frame = hpcjobs.accounting(site="local", since="1h")
    assert list(frame["name"]) == ["first"]
    assert list(frame.columns) == list(COLUMNS) == list(frame.attrs["columns"])
    assert frame.attrs["columns"]["queue_wait_s"].startswith("seconds: ")
    assert hpcjobs.accounting(site="local", since="1h", name="other*").empty


def test_a_study_gives_a_row_per_size_with_bounds_and_units(here: Path) -> None:
    (here / "work.py").write_text("import time\ntime.sleep(1.1)\n")
    study = hpcjobs.scale(["work.py"], [(1, 1), (1, 2)], site="local", repeats=2, time="5m")
    study.submit()
    assert dict(study.wait(timeout_s=240)) == {"COMPLETED": 4}
    table = hpcjobs.find_study("work").results()
    assert list(table.columns) == list(handle.COLUMNS) == list(table.attrs["columns"])
    assert list(table["ranks"]) == [1, 2]
    assert list(table["unit"].unique()) == ["runs/h"]
    assert (table["throughput_low"] <= table["throughput"]).all()
    assert {table[name].dtype for name in ("step_s", "epoch_s", "energy_j", "cost_per_million")} == {
        np.dtype("float64")
    }
    runs = study.runs()
    assert len(runs) == 4
    assert list(runs.columns) == list(handle.RUN_COLUMNS) == list(runs.attrs["columns"])
    assert study.report(here / "page").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"program": []}, "needs a program"),
        ({"program": ""}, "needs a program"),
        ({"sizes": [1.5]}, "sizes"),
        ({"sizes": []}, "sizes"),
        ({"sizes": [(1, 0)]}, "sizes"),
        ({"repeats": 0}, "repeats=0"),
        ({"over": {"factor": []}}, "factor has no values"),
    ],
)
def test_a_study_that_cannot_be_is_refused_at_once(arguments: dict[str, Any], problem: str, here: Path) -> None:
    with pytest.raises(RequestError, match=problem):
        hpcjobs.scale(**{"program": "work.py", "sizes": [1], "site": "local", **arguments})


def test_sizes_may_be_integers_of_numpy(here: Path) -> None:
    sizes = [*np.array([1, 2]), (np.int64(2), np.int64(4))]
    study = hpcjobs.scale("work.py", sizes, site="local", repeats=np.int64(2))  # type: ignore[arg-type]
    assert "2x4" in [str(size) for size in study._study.sizes]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"since": "yesterday"}, "since yesterday: not a time"),
        ({"until": float("nan")}, "until nan: not a time"),
        ({"since": pd.NaT}, "not a time"),
        ({"states": ["NOSUCH"]}, "states NOSUCH: not a job state"),
    ],
)
def test_the_accounting_refuses_a_time_or_state_that_is_none(
    arguments: dict[str, Any], problem: str, here: Path
) -> None:
    with pytest.raises(RequestError, match=problem):
        hpcjobs.accounting(site="local", **arguments)


def test_the_accounting_takes_datetimes_and_numbers_of_jobs(here: Path) -> None:
    """A naive Timestamp is local, as a text is, although pandas counts it as UTC."""
    moment = datetime(2026, 11, 1, 12, 30)
    texts = parse_moment("since", "2026-11-01T12:30")
    for since in (moment, pd.Timestamp(moment), pd.Timestamp(moment).tz_localize(tz=moment.astimezone().tzinfo)):
        assert parse_moment("since", since) == texts
        assert hpcjobs.accounting(site="local", since=since, jobs=[1]).empty
    assert parse_moment("since", moment.date()) == parse_moment("since", "2026-11-01")


def test_every_column_of_the_tables_is_documented_with_its_unit() -> None:
    text, reports = ((REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in ("python.md", "reports.md"))
    rows = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in reports.splitlines()
        if line.startswith("| `")
    }
    for name in COLUMNS:
        assert rows[f"`{name}`"] == unit_of(name), name
    for name, meaning in (*handle.COLUMNS.items(), *handle.RUN_COLUMNS.items(), *results.COLUMNS.items()):
        unit = meaning.partition(":")[0]
        assert f"| `{name}` | {unit} |" in text, name


@pytest.mark.parametrize("path", sorted((REPOSITORY / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_imports_nothing_but_the_public_interface(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    tree = ast.parse("\n".join(line for line in source.splitlines() if not line.startswith("%")))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name for name in names if name.startswith("hpcjobs")} == {"hpcjobs"}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_package(node.value)}
    assert used <= set(hpcjobs.__all__)


def _is_package(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "hpcjobs"
