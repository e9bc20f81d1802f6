"""What a study says about its runs, and how loudly it says what it does not know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import polars as pl
import pytest

from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.jobstats.derive import SCHEMA
from hpcjobs.jobstats.sources import AccountingTable
from hpcjobs.record.summary import Quantiles, RunSummary, Throughput
from hpcjobs.scaling import comparison, page, right_size
from hpcjobs.scaling import runs as scaling_runs
from hpcjobs.scaling.analysis import analyse, analyse_series
from hpcjobs.scaling.right_size import advise_nodes
from hpcjobs.scaling.runs import _COLUMNS, tabulate
from hpcjobs.scaling.study import Mode, Size, Study, StudyRun
from hpcjobs.scaling.study_sweep import define
from hpcjobs.sweeps.cells import command
from hpcjobs.sweeps.submit import resolve_program

NOISE = (0.99, 1.0, 1.01)


def runs(of_size: dict[int, float], /, **more: Any) -> pl.DataFrame:
    """Three runs of each node count, 1 % apart."""
    rows = []
    for nodes, value in of_size.items():
        for repeat, noise in enumerate(NOISE, 1):
            row = {
                "nodes": nodes, "ranks": 2 * nodes, "ntasks_per_node": 2, "repeat": repeat,
                "job_id": f"{nodes}{repeat}", "state": "COMPLETED", "throughput": value * noise, "unit": "images/s",
                "step_s": 0.1, "communication_s": 0.02, "data_wait_s": 0.01, "samples": 1000, "cost": 0.5,
                "currency": "EUR", "node_list": f"n[1-{nodes}]", "source": "sacct", "code": "abc", "run_dir": "/runs/x",
                "node_model": "EPYC", "series": "",
            }  # fmt: skip
            rows.append(row | more)
    return pl.DataFrame([dict.fromkeys(_COLUMNS) | row for row in rows], schema=_COLUMNS, orient="row")


def amdahl(serial: float, *sizes: int) -> dict[int, float]:
    return {n: 1000 / (serial + (1 - serial) / n) for n in sizes}


def study(**more: Any) -> Study:
    request = {"name": "s", "site": "local", "mode": "strong", "program": ("ddp",), "repeats": 3,
             "sizes": (Size(nodes=1, ntasks_per_node=1), Size(nodes=2, ntasks_per_node=1))}  # fmt: skip
    return Study(**{**request, **more})


def test_table_speedup_and_efficiency_are_against_the_smallest_size() -> None:
    analysis = analyse(runs({2: 100, 4: 180}))
    assert [group.n for group in analysis.groups] == [2, 4]
    assert analysis.groups[1].speedup.value == pytest.approx(1.8)
    assert analysis.groups[1].efficiency.value == pytest.approx(0.9)
    assert analysis.groups[1].efficiency.low < 0.9 < analysis.groups[1].efficiency.high
    first = analysis.groups[0]
    assert (first.communication, first.data_wait, first.compute) == pytest.approx((0.2, 0.1, 0.7))
    assert first.cost_per_million == pytest.approx(500)


def test_the_parts_of_a_bar_add_up_to_a_step_and_its_share_of_checkpoints() -> None:
    table = runs({1: 100, 2: 180}, checkpoint_share=0.05)
    (axes,) = page.draw_figures(analyse(table), table)["breakdown"].axes
    heights = [[bar.get_height() for bar in part] for part in axes.containers]
    assert [part.get_label() for part in axes.containers] == ["compute", "communication", "data wait", "checkpoint"]
    assert [heights[n][1] for n in range(4)] == pytest.approx([70, 20, 10, 5])  # milliseconds of a step of 100


def test_the_wait_of_a_study_is_estimated_for_its_largest_size_in_nodes_and_tasks(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1x2 and 2x1 have as many ranks, and are not the same job."""
    sizes = {"1x1": (1, 1, 100), "1x2": (1, 2, 190), "2x1": (2, 1, 150)}
    every = [runs({nodes: rate}, ranks=nodes * tasks, ntasks_per_node=tasks) for nodes, tasks, rate in sizes.values()]
    listed = [
        StudyRun(size=Size(nodes=nodes, ntasks_per_node=tasks), repeat=1, job_id="7", run_dir=name, job_dir=name)
        for name, (nodes, tasks, _) in sizes.items()
    ]
    requests: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(right_size, "list_runs", lambda _: listed)
    monkeypatch.setattr(right_size, "estimate_starts", lambda folder, options: requests.append((str(folder), options)))
    monkeypatch.setattr(right_size, "read_runs", lambda _: pl.concat(every))
    monkeypatch.setattr(right_size.study, "read", lambda _: study())
    (here / "s.study.json").write_text("{}", encoding="utf-8")
    assert list(right_size.right_size(["s"])) == ["s"]
    assert requests == [("2x1", ["--nodes=1", "--ntasks-per-node=2"])]


@pytest.mark.parametrize("unknown", ["communication_s", "data_wait_s"])
def test_compute_is_unknown_where_a_part_of_the_step_was_not_measured(unknown: str) -> None:
    analysis = analyse(runs({1: 100, 2: 180}, **{unknown: None}))
    assert [group.compute for group in analysis.groups] == [None, None]
    headers, rows = page.sizes(analysis)
    assert "compute" not in headers
    assert "100%" not in rows[1]
    assert "breakdown" not in page.draw_figures(analysis, runs({1: 100, 2: 180}))


def test_one_rank_waits_for_no_other_and_computes_when_it_does_not_wait_for_data() -> None:
    analysis = analyse(runs({1: 100, 2: 180}, ranks=1, communication_s=None))
    assert analysis.groups[0].compute == pytest.approx(0.9)


def test_with_two_sizes_no_law_is_used_and_the_summary_gives_the_reason() -> None:
    analysis = analyse(runs(amdahl(0.05, 1, 2)))
    assert analysis.chosen is None
    assert analysis.doubling is None
    assert "too few to tell a law" in analysis.summary[0]


def test_laws_that_three_sizes_cannot_tell_apart_are_named_and_none_is_chosen() -> None:
    analysis = analyse(runs(amdahl(0.05, 1, 2, 4)))
    assert analysis.chosen is None
    assert {"Amdahl", "USL"} <= {one.law.name for one in analysis.possible}
    assert "cannot be told apart: more sizes and repeats tell" in analysis.summary[0]


def test_a_knee_beyond_what_was_measured_is_called_an_extrapolation() -> None:
    """s = 0.05: 80 % at N = 6 exactly, as 1 / (1 + 0.05 (N - 1)) says; measured up to 4."""
    analysis = analyse(runs(amdahl(0.05, 1, 2, 4)))
    assert analysis.knee.measured == 4
    assert analysis.knee.fitted is not None
    low, high = analysis.knee.fitted.low, analysis.knee.fitted.high
    assert low is not None
    assert low < 6
    assert high is None or high > 6
    assert analysis.knee.beyond
    assert any("extrapolation beyond the 4 measured" in line for line in analysis.summary)
    assert any("if the law holds beyond what was measured" in line for line in analysis.summary)


def test_a_study_that_gets_slower_with_more_is_described_by_usl() -> None:
    usl = {n: 1000 * n / (1 + 0.1 * (n - 1) + 0.02 * n * (n - 1)) for n in (1, 2, 4, 8, 16)}
    analysis = analyse(runs(usl))
    assert analysis.chosen is not None
    assert analysis.chosen.law.name == "USL"


def test_three_sizes_that_fall_are_not_told_by_amdahl() -> None:
    """As on a slow network: Amdahl's law would put its serial fraction at 1 and be half wrong everywhere."""
    analysis = analyse(runs({1: 10_800, 2: 3_600, 4: 2_300}))
    assert analysis.chosen is None
    assert "More nodes are slower here" in analysis.summary[0]
    assert analysis.knee.measured == 1


def test_a_law_that_misses_the_runs_is_not_used_only_because_there_are_three_sizes() -> None:
    """A study of Horovod on two cores: four hosts share them."""
    measured = pl.Series([41_322, 36_265, 38_437, 42_533, 37_055, 34_417, 15_993, 9_708, 10_648], dtype=pl.Float64)
    analysis = analyse(runs({1: 1, 2: 1, 4: 1}).with_columns(measured.alias("throughput")))
    by_name = {one.law.name: one for one in analysis.fits}
    assert by_name["Amdahl"].rms > 0.25 > by_name["USL"].rms
    assert by_name["Amdahl"] not in analysis.possible
    assert by_name["USL"] in analysis.possible


def test_no_law_is_used_where_none_fits() -> None:
    analysis = analyse(runs({1: 100, 2: 400, 4: 80, 8: 900}))
    assert analysis.chosen is None
    assert "No law fits the runs" in analysis.summary[0]


def test_weak_scaling_is_fitted_by_gustafson() -> None:
    analysis = analyse(runs({n: 1000 * (0.1 + 0.9 * n) for n in (1, 2, 4, 8)}))
    (gustafson,) = [fitted for fitted in analysis.fits if fitted.law.name == "Gustafson"]
    assert gustafson.parameters["serial"] == pytest.approx(0.1, abs=0.01)
    assert analysis.chosen is gustafson


@pytest.mark.parametrize(("column", "what"), [("code", "code versions"), ("node_model", "node models")])
def test_mixed_runs_are_refused_or_said_loudly(column: str, what: str) -> None:
    mixed = pl.concat([runs({1: 100}), runs({2: 180}, **{column: "another"})])
    with pytest.raises(RequestError, match=what):
        analyse(mixed)
    assert what in analyse(mixed, allow_mixed=True).mixed[0]


def test_runs_without_a_figure_are_left_out_by_name() -> None:
    failed = runs({4: 100}, throughput=None, state="FAILED")
    analysis = analyse(pl.concat([runs({1: 100, 2: 190}), failed]))
    assert analysis.left_out == ["job 41: FAILED", "job 42: FAILED", "job 43: FAILED"]
    with pytest.raises(RequestError, match="no run of the study"):
        analyse(failed)


def test_the_page_needs_no_network_and_escapes_what_it_is_given(here: Path) -> None:
    table = runs(amdahl(0.05, 1, 2, 4), run_dir="/runs/<script>alert(1)</script>")
    analysis = analyse(table)
    written = page.write(study(program=("ddp", "--name", "<b>&")), {"": analysis}, table, here / "out")
    html = (here / "out" / "index.html").read_text(encoding="utf-8")
    namespaces = r'xmlns(:\w+)?="[^"]*"'
    assert not re.search(
        r'(src|href)="(?!#)|https?://', re.sub(namespaces, "", html).replace('xlink:href="#', 'href="#')
    )
    assert "<script>" not in html
    assert "&lt;b&gt;" in html
    assert html.count("<svg") == len(page.draw_figures(analysis, table)) == 4
    assert {path.name for path in written} >= {"report.md", "runs.csv", "runs.parquet", "speedup.png", "spread.svg"}
    assert all(path.stat().st_size > 0 for path in written)
    assert pl.read_parquet(here / "out" / "runs.parquet").to_dicts() == table.to_dicts()


def test_two_studies_are_compared_at_the_sizes_they_share() -> None:
    now, then = analyse(runs({1: 100, 2: 190, 4: 300})), analyse(runs({1: 100, 2: 150}))
    headers, one, two = comparison.compare(now, then)
    assert (headers[0], one[0], two[0]) == ("nodes x tasks", "1x2", "2x2")
    assert headers[-1] == "significant at 5 %"
    assert (one[3][:4], one[-1]) == ("1.00", "no (p = 1)")
    assert two[3].startswith("1.27 (1.2")
    assert two[-1].startswith("yes (p ")


def two_shapes(value: float) -> pl.DataFrame:
    """Two ranks on one node, and on two, which are half as fast."""
    shapes = [(1, 1, value / 2), (1, 2, value), (2, 1, value / 2)]
    parts = [runs({n: v}, ranks=n * tasks, ntasks_per_node=tasks) for n, tasks, v in shapes]
    return pl.concat(parts)


def test_sizes_of_as_many_ranks_are_compared_by_their_nodes_too(here: Path) -> None:
    rows = comparison.compare(analyse(two_shapes(200)), analyse(two_shapes(100)))[1:]
    assert [(row[0], row[1].split()[0], row[2].split()[0]) for row in rows] == [
        ("1x1", "100", "50"), ("1x2", "200", "100"), ("2x1", "100", "50"),
    ]  # fmt: skip
    bounds = here / "ref.yaml"
    bounds.write_text("sizes: {2x1: {throughput: 90}, 1x2: {throughput: 190}}\n")
    checks = comparison.check(analyse(two_shapes(200)), str(bounds))
    assert [(check.size, check.held) for check in checks] == [("2x1", True), ("1x2", True)]
    bounds.write_text("sizes: {2: {throughput: 90}}\n")
    with pytest.raises(RequestError, match="several sizes"):
        comparison.check(analyse(two_shapes(200)), str(bounds))


def test_bounds_hold_or_are_missed(here: Path) -> None:
    bounds = here / "ref.yaml"
    bounds.write_text("unit: images/s\nsizes:\n  2: {efficiency: 0.9, throughput: 200, tolerance: 0.1}\n")
    analysis = analyse(runs({1: 100, 2: 170}))
    assert [(verdict.what, verdict.held) for verdict in comparison.check(analysis, str(bounds))] == [
        ("throughput", False), ("efficiency", True),
    ]  # fmt: skip
    bounds.write_text("sizes:\n  8: {efficiency: 0.9}\n")
    with pytest.raises(RequestError, match="has not measured"):
        comparison.check(analysis, str(bounds))


@pytest.mark.parametrize(
    ("bound", "problem"),
    [
        ("efficiency: 90", "write 0.9 for 90 %"),
        ("throughput: -1", "throughput -1: a bound is above 0"),
        ("throughput: 100, tolerance: 2", "tolerance 2: a share"),
    ],
)
def test_a_file_of_bounds_that_never_or_always_hold_is_refused(bound: str, problem: str, here: Path) -> None:
    (here / "ref.yaml").write_text(f"sizes: {{2: {{{bound}}}}}\n")
    with pytest.raises(ConfigError, match=problem):
        comparison.check(analyse(runs({1: 100, 2: 170})), "ref.yaml")


@pytest.mark.parametrize(
    ("condition", "held"),
    [
        ("efficiency>=0.9 at 2", [False]),
        ("efficiency >= 80% at 2x2", [True]),
        ("communication<=0.25", [True, True]),
        ("communication<=10%", [False, False]),
        ("step_s<=0.2 at 2", [True]),
        ("energy_j<=1e9", [False, False]),  # not measured: it holds no bound
    ],
)
def test_a_condition_is_checked_at_a_size_or_at_all(condition: str, held: list[bool]) -> None:
    analysis = analyse(runs({1: 100, 2: 170}))
    assert [verdict.held for verdict in comparison.check(analysis, condition)] == held


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("efficency>=0.9 at 2", "no figure 'efficency'"),
        ("efficiency>=0.9 at 8", "has not measured"),
        ("efficiency>0.9", "no condition"),
        ("efficiency>=x", "no condition"),
        ("efficiency>=0.9.1", "no condition"),
        ("efficiency>=.", "no condition"),
        ("efficiency=0.9", "write 'efficiency>=0.9 at 4'"),
        ("throughput>=90%", "throughput is no share"),
        ("efficiency>=90 at 2", "write 0.9 for 90 %"),
    ],
)
def test_a_condition_that_names_no_figure_or_size_is_refused(condition: str, problem: str) -> None:
    with pytest.raises(RequestError) as refused:
        comparison.check(analyse(runs({1: 100, 2: 170})), condition)
    assert problem in f"{refused.value} {refused.value.hint}"


def test_checks_are_written_as_junit_xml(here: Path) -> None:
    analysis = analyse(runs({1: 100, 2: 170}))
    checks = [*comparison.check(analysis, "efficiency>=0.9 at 2"), *comparison.check(analysis, "energy_j<=1 at 1")]
    comparison.write_junit(here / "out.xml", "a <b>", [*checks, *comparison.check(analysis, "speedup>=1.5 at 2")])
    suite = ElementTree.parse(here / "out.xml").getroot()
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", "3", "2")
    cases = {case.get("name"): [failure.get("message") for failure in case] for case in suite}
    assert cases == {
        "efficiency at 2x2": ["efficiency at 2x2: 0.85, at least 0.9"],
        "energy_j at 1x2": ["energy_j at 1x2: not measured, at most 1"],
        "speedup at 2x2": [],
    }


def test_several_studies_stand_in_one_picture_with_the_ratio_to_the_first(here: Path) -> None:
    named = [("one", runs({1: 100, 2: 190})), ("two", runs({1: 120, 2: 200})), ("three", runs({2: 180, 4: 300}))]
    analysed = [(name, analyse(table)) for name, table in named]
    above, below = comparison.draw(analysed).axes
    assert [line.get_label() for line in above.get_legend_handles_labels()[0]] == ["one", "two", "three"]
    drawn = [container.lines[0].get_xydata().tolist() for container in below.containers]
    assert drawn[0] == [[1, pytest.approx(1.2)], [2, pytest.approx(200 / 190)]]
    assert drawn[1] == [[2, pytest.approx(180 / 190)]]
    headers, *rows = page.make_matrix(dict(analysed))
    assert headers[:4] == ["series", "1x2", "2x2", "4x2"]
    assert [row[0] for row in rows] == ["one", "two", "three"]
    assert (rows[0][3], rows[2][1]) == ("not measured", "not measured")


def test_series_are_analysed_apart_and_never_as_sizes_of_one_another() -> None:
    one, two = runs({1: 100, 2: 190}, series="launcher=srun"), runs({1: 50, 2: 90}, series="launcher=mpirun")
    both = pl.concat([one, two])
    with pytest.raises(RequestError, match="several series"):
        analyse(both)
    series = analyse_series(both)
    assert {name: round(one.groups[0].throughput.value) for name, one in series.items()} == {
        "launcher=srun": 100, "launcher=mpirun": 50,
    }  # fmt: skip


def test_strong_scaling_keeps_the_global_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "8")
    sizes = (Size(nodes=1, ntasks_per_node=2), Size(nodes=1, ntasks_per_node=8))

    def programs(mode: Mode, batch: str) -> list[tuple[str, ...]]:
        program = ("echo", "--batch-size", batch, "--tag", "{nodes}/{ranks}")
        definition = define(study(mode=mode, program=program, sizes=sizes, repeats=1), [], None)
        return [command(resolve_program(definition), cell) for cell in definition.cells]

    assert [arguments[1:] for arguments in programs("strong", "64")] == [
        ("--batch-size", "64", "--tag", "1/2"),
        ("--batch-size", "16", "--tag", "1/8"),
    ]
    assert [arguments[2] for arguments in programs("weak", "64")] == ["64", "64"]
    with pytest.raises(RequestError, match="cannot be shared evenly by 8 ranks"):
        programs("strong", "3")


@pytest.mark.parametrize("target", [80.0, 0.0, -1.0, 1.0, float("nan")])
def test_a_target_that_is_no_share_is_refused(target: float) -> None:
    """``--target 80`` was taken for 8000 %."""
    with pytest.raises(RequestError, match=r"target efficiency of .* is not allowed") as refused:
        analyse(runs({1: 100, 2: 190}), target=target)
    assert "0.8 is 80 %" in str(refused.value)


def test_single_runs_give_no_interval_and_no_nan() -> None:
    """``(nan to nan`` was printed for the doubling, and NaN for every interval."""
    single = runs(amdahl(0.05, 1, 2, 4, 8)).filter(pl.col("repeat") == 2)
    for table in (single, single.filter(pl.col("nodes") < 8), single.filter(pl.col("nodes") < 4)):
        analysis = analyse(table)
        shown = [
            *analysis.summary,
            *(cell for row in (*page.sizes(analysis)[1], *page.fit_rows(analysis)) for cell in row),
        ]
        assert not [text for text in shown if "nan" in text.lower()]


def test_runs_in_different_units_are_not_compared() -> None:
    with pytest.raises(RequestError, match="different units: images/s, runs/h"):
        analyse(pl.concat([runs({1: 100}), runs({2: 3}, unit="runs/h")]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_throughput_that_is_no_number_is_left_out(value: float) -> None:
    broken = runs({4: 1.0}).with_columns(throughput=pl.lit(value))
    analysis = analyse(pl.concat([runs({1: 100, 2: 190}), broken]))
    assert [group.n for group in analysis.groups] == [1, 2]
    assert len(analysis.left_out) == 3


@pytest.mark.parametrize("with_summary", [True, False], ids=["summary.json", "by its time"])
@pytest.mark.parametrize("mode", ["strong", "weak"])
def test_the_truth_is_recovered_with_and_without_a_summary(
    here: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, with_summary: bool
) -> None:
    """A serial fraction of 0.1. A strong study does the same work at every size, a weak one N times as much."""
    serial = 0.1
    speedup = {n: 1 / (serial + (1 - serial) / n) if mode == "strong" else serial + (1 - serial) * n for n in (1, 2, 4)}
    calls, jobs = [], []
    for n, factor in speedup.items():
        work = n if mode == "weak" else 1
        folder = here / str(n)
        folder.mkdir()
        if with_summary:
            RunSummary("t", "s", "w", "completed", 0, n, throughput=Throughput(50.0 * factor, "x/s")).write(folder)
        calls.append(StudyRun(size=Size(nodes=n, ntasks_per_node=1), repeat=1, job_id=str(n), run_dir=str(folder)))
        jobs.append({"job_id": str(n), "state": "COMPLETED", "elapsed_s": round(1e6 * work / factor)})
    accounted = AccountingTable(pl.DataFrame(jobs, schema=SCHEMA, orient="row"), [], [])
    monkeypatch.setattr(scaling_runs, "gather", lambda expected, site: accounted)
    table = tabulate(calls, site="local", mode=mode)
    analysis = analyse(table)
    assert [group.speedup.value for group in analysis.groups] == pytest.approx(list(speedup.values()), rel=1e-4)
    (law,) = [one for one in analysis.fits if one.law.name == ("Amdahl" if mode == "strong" else "Gustafson")]
    assert law.parameters["serial"] == pytest.approx(serial, rel=1e-3)
    assert analysis.doubling is None, "a single run of each size excludes no law"


def test_the_prediction_holds_what_each_possible_law_predicts() -> None:
    """Efficiency falls by 0.5 % with each node: Gustafson's law, which has a floor, would be sure of too much."""
    exact = runs({n: 1000 * n / (1 + 0.005 * (n - 1)) for n in (1, 2, 4, 8, 16)})
    rough = exact.with_columns(throughput=pl.col("throughput") * (1 + 0.05 * (pl.col("repeat") - 2)))
    analysis = analyse(rough)
    assert {"USL", "Gustafson"} <= {one.law.name for one in analysis.possible}
    assert analysis.doubling is not None
    _, low, high = analysis.doubling
    assert low is not None
    assert high is not None
    assert all(low <= one.at(32).value <= high for one in analysis.possible)
    assert high <= 32 * (analysis.groups[0].throughput.high or 0)


def test_a_prediction_is_within_its_own_bounds_where_the_linear_one_is_the_limit() -> None:
    values = {1: [984.793, 977.076, 970.33], 2: [1964.964, 2009.217, 2023.071],
              4: [4043.092, 4035.815, 3971.941], 8: [8048.677, 7936.833, 8269.861]}  # fmt: skip
    table = runs(dict.fromkeys(values, 1.0))
    measured = [values[row["nodes"]][row["repeat"] - 1] for row in table.iter_rows(named=True)]
    doubling = analyse(table.with_columns(throughput=pl.Series(measured))).doubling
    assert doubling is not None
    assert doubling.low is not None
    assert doubling.high is not None
    assert doubling.low <= doubling.value <= doubling.high


def test_json_of_an_analysis_can_be_written() -> None:
    analysis = analyse(runs({1: 100, 2: 190}))
    assert json.loads(json.dumps([group._asdict() for group in analysis.groups]))[0]["n"] == 1


def test_the_time_of_an_epoch_is_that_of_its_steps_without_evaluations_and_the_start(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten epochs a resumed run did the last one, in 60 s with everything: nine steps of 0.5 s, and one of 1.5 s."""
    steps = Quantiles.of([0.5] * 9 + [1.5])
    times: dict[str, Any] = {"elapsed_s": 60.0, "steps": 100, "epochs": 10.0, "step_time_s": steps}
    RunSummary("t", "s", "w", "completed", 0, 1, **times, resumed_from_step=90).write(here)
    monkeypatch.setattr(
        scaling_runs, "gather", lambda expected, site: AccountingTable(pl.DataFrame(schema=SCHEMA), [], [])
    )
    run = StudyRun(size=Size(nodes=1, ntasks_per_node=1), repeat=1, job_id="1", run_dir=str(here))
    assert tabulate([run], site="local", mode="strong")["epoch_s"].to_list() == [6.0]
    times["step_time_s"] = None
    RunSummary("t", "s", "w", "completed", 0, 1, **times, resumed_from_step=100).write(here)
    assert tabulate([run], site="local", mode="strong")["epoch_s"].to_list() == [None]


@pytest.mark.parametrize(("unit", "warned"), [("runs/h", True), ("rank-runs/h", True), ("images/s", False)])
def test_a_study_measured_by_the_time_of_whole_jobs_says_so(unit: str, warned: bool) -> None:
    lines = page.warnings(analyse(runs({1: 100, 2: 190}, unit=unit)))
    assert any("imports and the start of Python included" in line for line in lines) == warned


def test_a_size_is_its_nodes_and_its_tasks_and_the_advice_names_both() -> None:
    """Two ranks on one node and on two nodes were one size, whose difference counted as scatter."""
    shapes = {(1, 1): 100.0, (1, 2): 190.0, (2, 1): 120.0, (2, 4): 700.0}
    parts = [
        runs({nodes: value}).with_columns(ntasks_per_node=pl.lit(tasks), ranks=pl.lit(nodes * tasks))
        for (nodes, tasks), value in shapes.items()
    ]
    analysis = analyse(pl.concat(parts).cast({"ranks": pl.Int64, "ntasks_per_node": pl.Int64}))
    assert [(group.nodes, group.ranks, group.runs) for group in analysis.groups] == [
        (1, 1, 3), (1, 2, 3), (2, 2, 3), (2, 8, 3),
    ]  # fmt: skip
    assert "1x2, 2x1" in analysis.summary[0]
    assert [(advice.option, advice.value) for advice in advise_nodes(analysis)] == [
        ("--nodes", "2"), ("--ntasks-per-node", "4"),
    ]  # fmt: skip


def test_an_efficiency_is_measured_up_to_where_its_lower_bound_reaches_the_target() -> None:
    analysis = analyse(runs({1: 100, 2: 190, 4: 322}))  # 0.805 at 4, a few per cent either way
    assert analysis.groups[2].efficiency.value > 0.8 > (analysis.groups[2].efficiency.low or 1)
    assert analysis.knee.measured == 2
    assert any("up to 2 nodes (by the lower bounds" in line for line in analysis.summary)
    assert [advice.value for advice in advise_nodes(analysis)] == ["2"]


def test_a_study_that_falls_says_that_more_are_slower_and_predicts_nothing() -> None:
    """It was given a contention of 5.71 and a prediction above what was measured."""
    analysis = analyse(runs({1: 41_000, 2: 12_000, 4: 10_000}))
    assert analysis.summary[0].startswith(
        "More nodes are slower here: 40,999 images/s with 1 node, 10,000 images/s with 4"
    )
    assert analysis.doubling is None
    assert all(one.parameters.get(name, 0) <= 1 for one in analysis.fits for name in ("serial", "sigma"))


def test_a_knee_far_beyond_what_was_measured_is_so_many_or_more() -> None:
    summary = " ".join(analyse(runs({1: 100, 2: 200, 4: 400})).summary)
    assert "The knee of the law is 8 nodes or more" in summary
    assert "at at" not in summary


def test_energy_of_a_size_is_marked_as_modelled_where_that_of_one_run_is() -> None:
    frame = runs({1: 100, 2: 190}, energy_j=3.6e6, energy_source="measured").with_columns(
        energy_source=pl.when(pl.col("job_id") == "23").then(pl.lit("modelled")).otherwise("energy_source")
    )
    headers, rows = page.sizes(analyse(frame))
    assert [row[headers.index("energy")] for row in rows] == ["1 kWh", "~1 kWh"]


ONE, OTHER = ("rate", 8.2, "it/s"), ("loss", 2.0, "")
LOG = "hpcjobs: figure rate: no line of the log has it\n"


@pytest.mark.parametrize(
    ("state", "figures", "own", "rate", "problem"),
    [
        ("COMPLETED", [ONE, OTHER], None, (8.2, "it/s"), None),
        ("TIMEOUT", [ONE], None, (8.2, "it/s"), None),
        (None, [ONE], None, (8.2, "it/s"), None),
        ("FAILED", [ONE], None, (None, None), None),
        ("CANCELLED", [ONE], 5.0, (None, None), None),
        ("COMPLETED", [OTHER], None, (None, None), "figure rate: no line of the log has it"),
        ("COMPLETED", [], 5.0, (None, None), "figure rate: no line of the log has it"),
        ("COMPLETED", [("rate", 0.0, "it/s")], None, (None, None), "figure rate is 0, and only one above 0"),
        ("COMPLETED", [("rate", 8.2, "")], None, (8.2, "rate"), None),
    ],
)
def test_a_run_counts_with_the_first_figure_asked_for_and_only_if_it_did_not_fail(
    here: Path, monkeypatch: pytest.MonkeyPatch, state: str | None, figures: list[tuple[str, float, str]],
    own: float | None, rate: tuple[float | None, str | None], problem: str | None,
) -> None:  # fmt: skip
    """A failed size was 95 % efficient and recommended; a loss was taken for the rate that the log did not have."""
    written = {name: {"value": value, "unit": unit, "better": "more", "take": "last", "readings": 1, "last": value,
                      "median": value, "least": value, "most": value} for name, value, unit in figures}  # fmt: skip
    summary: dict[str, Any] = {"figures": written} if figures else {}
    if own is not None:
        summary["throughput"] = {"value": own, "unit": "it/s"}
    (here / "summary.json").write_text(json.dumps(summary))
    (here / "figures.log").write_text("" if any(name == "rate" for name, *_ in figures) else LOG)
    jobs = [] if state is None else [{"job_id": "1", "state": state, "elapsed_s": 9}]
    table = AccountingTable(pl.DataFrame(jobs, schema=SCHEMA, orient="row"), [], [])
    monkeypatch.setattr(scaling_runs, "gather", lambda expected, site: table)
    run = StudyRun(size=Size(nodes=1, ntasks_per_node=1), repeat=1, job_id="1", run_dir=str(here))
    (row,) = tabulate([run], site="local", mode="strong", figure="rate").to_dicts()
    assert (row["throughput"], row["unit"]) == rate
    assert (row["problem"] or "").startswith(problem or "") == (problem is not None or row["problem"] is None)


def test_efficiencies_of_two_studies_are_compared_against_a_size_that_both_have() -> None:
    """One began with two nodes and the other with one: 89 % stood beside 84 % of the same throughput."""
    now, then = analyse(runs({2: 190, 4: 340})), analyse(runs({1: 100, 2: 190, 4: 340}))
    headers, two, four = comparison.compare(now, then)
    assert headers[4] == "efficiency against 2x2"
    assert (two[4:6], four[4:6]) == (["100%", "100%"], ["89%", "89%"])


def test_a_strong_study_is_not_compared_with_a_weak_one() -> None:
    comparison.check_modes(study(), study())
    with pytest.raises(RequestError, match="s is of strong scaling, s of weak scaling"):
        comparison.check_modes(study(), study(mode="weak"))


def test_bounds_and_targets_that_are_exactly_reached_hold() -> None:
    exact = analyse(
        runs({1: 1, 2: 1}).with_columns(throughput=pl.when(pl.col("nodes") == 1).then(100.0).otherwise(160.0))
    )
    conditions = ("efficiency>=0.8 at 2", "throughput>=160 at 2", "efficiency<=0.8 at 2")
    assert all(one.held for condition in conditions for one in comparison.check(exact, condition))
    assert exact.knee.measured == 2
