"""How a figure of merit is read from the lines of a log, whatever the lines are."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from hpcjobs.record.figures import (
    MOST_VALUES,
    FigureReader,
    FigureRule,
    Readings,
    parse_number,
    read_results,
    split_lines,
)
from hpcjobs.site.figures import PRESETS, Figure, named_figures, parse_metric

LOGS = Path(__file__).parents[2] / "data" / "program_logs"
KNOWN = {
    ("lammps", "timesteps/s"): 201.085,
    ("gromacs", "ns/day"): 116.758,
    ("hpl", "Gflops"): 229.96,
    ("nanogpt", "iteration"): 18.84,  # the median: the first one compiles, another one evaluates
    ("nanogpt", "loss"): 2.4590,
    ("huggingface", "samples/s"): 96.925,
    ("huggingface", "loss"): 0.5641666,
}
"""What a person reads in the logs."""


def reader_of(name: str, figure: Figure) -> FigureReader:
    return FigureReader(FigureRule(name, figure.pattern, figure.json, figure.unit_text, figure.better, figure.take))


@pytest.mark.parametrize(("program", "figure"), KNOWN)
@pytest.mark.parametrize("label", ["", "0: ", " 12: ", "[1,0]<stdout>:", "[0]<stdout>:"])
def test_the_figures_of_known_programs_are_read_from_their_logs(program: str, figure: str, label: str) -> None:
    reader = reader_of(figure, PRESETS[program][figure])
    for line in split_lines((LOGS / f"{program}.log").read_bytes()):
        reader.read(label + line, labelled=bool(label))
    result = reader.result()
    assert result is not None
    assert result.value == KNOWN[program, figure]


def test_every_preset_has_a_recorded_log() -> None:
    assert {(program, figure) for program, figures in PRESETS.items() for figure in figures} == KNOWN.keys()


@pytest.mark.parametrize(
    ("metric", "name", "unit"),
    [
        (r"tokens/s (\S+)", "tokens/s", "tokens/s"),
        (r"(\S+) ns/day", "ns/day", "ns/day"),
        (r"loss: ([\d.]+)", "loss", ""),
        (r"^rate=(?P<rate>\S+)", "rate", ""),
        (r"step \d+ time (\S+)ms; unit=ms; better=less", "time", "ms"),
        (r"(\d+); name=count", "count", ""),
        ("json:train.tokens_per_s; unit=tokens/s", "tokens_per_s", "tokens/s"),
    ],
)
def test_a_metric_has_the_name_of_the_word_beside_its_number(metric: str, name: str, unit: str) -> None:
    ((key, figure),) = parse_metric(metric).items()
    assert (key, figure.unit_text) == (name, unit)


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("tokens/s", "groups"),
        ("(a)(b)", "2 groups"),
        ("(", "no regular expression"),
        ("gromac", "did you mean 'gromacs'"),
        ("(x); better=most", "better"),
        ("json:", "json"),
    ],
)
def test_a_metric_that_names_no_number_is_refused_with_what_is_wrong(metric: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_metric(metric)


def test_a_text_in_a_file_is_a_preset_or_a_pattern() -> None:
    figures = named_figures({"any": "lammps", "rate": r"rate (\S+)", "off": None})
    assert list(figures) == ["timesteps/s", "rate", "off"]


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1234.5", "", 1234.5),
        ("1,234,567.8", "", 1234567.8),
        ("2.4683,", "", 2.4683),
        ("18.9ms,", "ms", 18.9),
        ("18.9ms,", "img", None),
        ("87%", "", 87.0),
        ("2.2996e+02", "", 229.96),
        ("'96.9',", "", 96.9),
        ("12.3k", "", None),
        ("1,23", "", None),
        ("0,123", "", None),
        ("1234,567", "", None),
        ("nan", "", None),
        ("inf", "", None),
        ("1e999", "", None),
        ("", "", None),
        ("-", "", None),
        ("0x10", "", None),
    ],
)
def test_a_number_is_read_as_a_person_reads_it_or_not_at_all(text: str, unit: str, value: float | None) -> None:
    assert parse_number(text, unit) == value


def test_text_that_is_no_number_is_sample_for_the_message() -> None:
    reader = FigureReader(FigureRule("rate", pattern=r"rate (\S+)"))
    assert reader.read("rate 12.3k") is None
    assert (reader.unreadable, reader.result()) == ("12.3k", None)


@pytest.mark.parametrize(
    ("metric", "lines", "value", "unit"),
    [
        (r"rate (\S+) MB/s", ["rate 950 MB/s", "rate 1.2 GB/s"], 1075, "MB/s"),
        (r"rate (\S+)", ["rate 950 MB/s", "rate 1.2 GB/s"], 1.075e9, "B/s"),
        (r"rate (\S+); unit=MB/s", ["rate 950MB/s", "rate 1.2GB/s"], 1075, "MB/s"),
        (r"([\d.]+)it/s", ["[00:01, 1.50it/s]", "[00:02,  2.00s/it]"], 1, "it/s"),
        (r"tokens/s (\S+)", ["tokens/s 900", "ktokens/s 1.1"], 1000, "tokens/s"),
        (r"time (\S+)", ["time 950 ms", "time 1.05 s"], 1, "s"),
        (r"time (\S+)ms; unit=ms; better=less", ["time 950ms,", "time 1.05s,"], 1000, "ms"),
        (r"rate (\S+); unit=tokens/s", ["rate 900 tok/s", "rate 1.1 ktok/s"], 1000, "tokens/s"),
        (r"acc (\S+)", ["acc 0.9 min 0.5", "acc 0.9 s 3"], 0.9, "s"),
    ],
)
def test_a_program_that_changes_its_unit_is_read_in_one(metric: str, lines: list[str], value: float, unit: str) -> None:
    ((name, figure),) = parse_metric(metric).items()
    reader = reader_of(name, figure)
    for line in lines:
        reader.read(line)
    result = reader.result()
    assert result is not None
    assert (result.value, result.unit) == (pytest.approx(value), unit)


def test_a_value_in_a_unit_that_cannot_be_compared_does_not_count() -> None:
    reader = FigureReader(FigureRule("rate", pattern=r"rate (\S+)"))
    assert [reader.read(line) for line in ("rate 12 it/s", "rate 99 img/s")] == [12, None]
    assert (reader.other_unit, reader.unit) == ("img/s", "it/s")


@pytest.mark.parametrize("printed", ["1.234,5", "1\u202f234,5", "1\u00a0234,5", "1234,5", "0,123", "1'234.5"])
def test_a_number_of_another_language_is_refused_and_not_read_as_a_part_of_it(printed: str) -> None:
    reader = FigureReader(FigureRule("rate", pattern=r"rate (\S+)"))
    assert reader.read(f"rate {printed} it/s") is None
    assert reader.unreadable == printed


def test_commas_that_turn_out_to_be_decimal_signs_take_back_what_was_read_before() -> None:
    reader = FigureReader(FigureRule("rate", pattern=r"rate (\S+)"))
    assert [reader.read(f"rate {text} it/s") for text in ("12,345", "9,87", "12,345")] == [12345, None, None]
    assert reader.result() is None


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"train": {"rate": 12.5}}', 12.5),
        ('INFO {"train": {"rate": "12.5"}}', 12.5),
        ('{"train": [{"rate": 12.5}]}', None),
        ('{"train": {"rate": true}}', None),
        ('{"train": {"rate": {}}}', None),
        ('{"train": {"rate": 12.5}', None),
        ('{"train":' + "[" * 100_000 + '"rate"', None),
        ('{"train": {"rate": NaN}}', None),
    ],
)
def test_a_path_finds_the_number_in_lines_of_json(line: str, value: float | None) -> None:
    assert FigureReader(FigureRule("rate", json_path="train.rate")).read(line) == value


def test_a_pattern_that_backtracks_without_end_is_given_up_and_the_others_go_on() -> None:
    evil = FigureReader(FigureRule("evil", pattern=r"(a+)+\d$"))
    good = FigureReader(FigureRule("good", pattern=r"rate (\d+)"))
    began = time.process_time()
    for number in range(100):
        evil.read("a" * 5000)
        good.read(f"rate {number}")
    assert evil.is_given_up
    assert good.values.count == 100
    assert time.process_time() - began < 5


def test_a_line_of_a_hundred_megabytes_costs_next_to_nothing() -> None:
    reader = FigureReader(FigureRule("rate", pattern=r"rate.*?(\d+)$"))
    huge = "rate " + "x" * 100_000_000
    began = time.process_time()
    assert reader.read(huge) is None
    assert time.process_time() - began < 1


def test_a_million_values_keep_a_bounded_memory_and_the_median() -> None:
    values = Readings()
    for number in range(100_000):
        values.add(float(number))
    assert len(values._sample) <= MOST_VALUES
    assert values.median == pytest.approx(50_000, rel=0.001)
    assert (values.count, values.least, values.most, values.last) == (100_000, 0, 99_999, 99_999)


@pytest.mark.parametrize(
    "entry", [None, [], "x", {"value": "fast"}, {"value": math.nan}, {"value": 1}, {"value": 10**400}]
)
def test_a_strange_summary_has_no_figures(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"figures": {"x": entry}}))
    assert read_results(path) == {}
    path.write_text("[" * 100_000)
    assert read_results(path) == {}
