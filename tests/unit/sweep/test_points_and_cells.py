"""Which cells a sweep has, what each one runs, and what keeps its identity."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.sweeps.cells import axis_of, command, from_csv, grid, make_cell, make_program, sample, shell_line, zip_
from hpcjobs.sweeps.spec import Sampling, SweepSpec, make_points

HOSTILE = [
    "two words", "", "it's", '"so"', "$(touch x)", "`touch x`", "back\\slash", "new\nline\n", "a,b", "{lr}", "--flag",
    "%j", "नमस्ते", "\t", "!", "*",
]  # fmt: skip


def cells(*arguments: str, points: list[dict[str, object]] | None = None, **options: object) -> list[list[str]]:
    """The words of each cell."""
    job = hpcjobs.plan(arguments, site="local").job
    program = make_program(job, env={}, **options)  # type: ignore[arg-type]
    return [list(command(program, make_cell(program, point))) for point in points or [{"lr": 0.1, "batch_size": 32}]]


def resolve_program(*arguments: str, point: dict[str, object], env: dict[str, str] | None = None) -> str:
    program = make_program(hpcjobs.plan(arguments, site="local").job, env=env or {})
    return make_cell(program, point).id


def test_a_grid_has_every_combination_and_a_zip_goes_in_step() -> None:
    assert grid(a=[1, 2], b=["x", "y"]) == [
        {"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"},
    ]  # fmt: skip
    assert zip_(a=[1, 2], b=["x", "y"]) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(RequestError, match="a has 1, b has 2"):
        zip_(a=[1], b=[1, 2])


def test_a_sample_is_the_same_for_a_seed_and_only_grows() -> None:
    space = {"lr": (1e-4, 1e-1, "log"), "layers": (1, 4), "act": ["relu", "gelu"]}
    few, many = sample(5, 3, **space), sample(9, 3, **space)
    assert many[:5] == few
    assert all(1e-4 <= p["lr"] <= 1e-1 and p["layers"] in range(1, 5) and p["act"] in space["act"] for p in many)
    assert sample(5, 4, **space) != few


def test_a_csv_file_is_read_as_text_and_a_ragged_row_is_named(here: Path) -> None:
    (here / "ok.csv").write_text('lr,name\n0.10,"a,b"\n1e-3,007\n', encoding="utf-8")
    assert from_csv("ok.csv") == [{"lr": "0.10", "name": "a,b"}, {"lr": "1e-3", "name": "007"}]
    (here / "bad.csv").write_text("lr,name\n1,a\n2\n")
    with pytest.raises(RequestError, match="row 2"):
        from_csv("bad.csv")


def test_values_of_a_flag_are_kept_as_they_were_typed() -> None:
    assert axis_of("lr=1e-3,0.10") == ("lr", ["1e-3", "0.10"])
    assert axis_of("seed=-1..2") == ("seed", ["-1", "0", "1", "2"])
    assert axis_of('text=["a,b", 3, true]') == ("text", ["a,b", "3", "true"])
    assert axis_of("text=[a,b]") == ("text", ["[a", "b]"])
    with pytest.raises(RequestError, match="NAME=VALUE"):
        axis_of("lr")


def test_parts_of_a_sweep_are_crossed_and_flags_add_to_the_files_axes() -> None:
    spec = SweepSpec(grid={"a": [1, 2]}, zip={"b": [3, 4], "c": [5, 6]})
    points = make_points(spec, ["d=7"])
    assert len(points) == 4
    assert points[1] == {"a": 1, "d": "7", "b": 4, "c": 6}
    with pytest.raises(RequestError, match="no parameters"):
        make_points(SweepSpec())


@pytest.mark.parametrize("text", ["a=0..99999999999", "a=-5..100000", f"a=0..{'9' * 5000}"])
def test_a_range_of_more_numbers_than_a_sweep_may_have_is_refused_before_it_is_counted_out(text: str) -> None:
    with pytest.raises(RequestError, match="at most"):
        axis_of(text)


@pytest.mark.parametrize(
    "spec",
    [
        SweepSpec(sample=Sampling(n=10**9, space={"a": [1, 2]})),
        SweepSpec(grid={name: list(range(100)) for name in "abcdef"}),
        SweepSpec(grid={"a": list(range(1000))}, cells=[{"b": n} for n in range(1000)]),
    ],
    ids=["sample", "grid", "crossed"],
)
def test_more_cells_than_a_sweep_may_have_are_refused_before_they_are_made(spec: SweepSpec) -> None:
    with pytest.raises(RequestError, match="a sweep has at most 100000 cells"):
        make_points(spec)


def test_an_endless_axis_is_refused(here: Path) -> None:
    with pytest.raises(RequestError, match="at most"):
        grid(a=itertools.count())
    with pytest.raises(RequestError, match="at most"):
        zip_(a=itertools.count(), b=[1])


@pytest.mark.parametrize("names", [{"a b": [1]}, {"-x": [1]}, {"lr": [1], "LR": [2]}, {"a.b": [1], "a_b": [2]}])
def test_a_name_that_cannot_be_a_flag_and_a_variable_is_refused(names: dict[str, list[int]]) -> None:
    with pytest.raises(RequestError, match="parameter"):
        grid(**names)


@pytest.mark.parametrize("value", [[1], {"a": 1}, float("nan"), "a\0b", "\udcff"])
def test_a_value_that_no_command_line_can_hold_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match="parameter x"):
        cells("true", points=[{"x": value}])


def test_trainers_and_python_files_take_flags_and_commands_take_what_they_name(here: Path) -> None:
    (here / "train.py").write_text("")
    assert cells("ddp", "--epochs", "3")[0][-4:] == ["--epochs", "3", "--lr=0.1", "--batch-size=32"]
    assert cells("ddp", points=[{"compile": True}, {"compile": False}, {"lr": None}])[0][-1] == "--compile"
    assert cells("ddp", points=[{"compile": False}])[0][-1] == "--no-compile"
    assert cells("train.py")[0][-2:] == ["--lr=0.1", "--batch_size=32"]
    assert cells("train.py", "lr={lr}")[0][-2:] == ["lr=0.1", "--batch_size=32"]
    assert cells("echo", "{lr} {{lr}} {other} {lr}")[0] == ["echo", "0.1 {lr} {other} 0.1"]
    assert cells("train.py", passing="env")[0][-1] == "train.py"
    assert cells("echo", passing="flags")[0] == ["echo", "--lr=0.1", "--batch_size=32"]


def test_any_text_reaches_the_program_and_its_environment_unchanged() -> None:
    tell = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['HPCJOBS_PARAM_X']]))"
    program = make_program(hpcjobs.plan(["python3", "-c", tell, "{x}", "a{x}b"], site="local").job, env={})
    for text in HOSTILE:
        line = shell_line(program, make_cell(program, {"x": text}))
        assert line.count("\n") == 1
        script = 'eval "$(cat)"; exec "$@"'
        done = subprocess.run(["bash", "-c", script], input=line, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [[text, f"a{text}b"], text]
    assert os.listdir() == []


def test_a_cell_is_the_same_whoever_says_it_and_in_whatever_order(here: Path) -> None:
    (here / "train.py").write_text("1")
    known = resolve_program("train.py", point={"lr": 0.1, "n": 3})
    assert resolve_program("train.py", point={"n": "3", "lr": "0.1"}) == known
    assert resolve_program("train.py", point={"n": "3", "lr": "0.10"}) != known
    assert resolve_program("train.py", "--fast", point={"lr": 0.1, "n": 3}) != known
    assert resolve_program("train.py", point={"lr": 0.1, "n": 3}, env={"A": "1"}) != known
    (here / "train.py").write_text("2")
    assert resolve_program("train.py", point={"lr": 0.1, "n": 3}) != known


def test_the_python_that_runs_a_cell_is_no_part_of_its_identity(here: Path) -> None:
    (here / "train.py").write_text("1")
    job = hpcjobs.plan(["train.py"], site="local").job
    other = replace(job, python="/opt/python", argv=("/opt/python", *job.argv[1:]))
    assert make_program(job, env={}).identity == make_program(other, env={}).identity
