"""Pictures of studies from 1 to 64 nodes: labels do not overlap, and a slow host stands out."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import polars as pl
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_analysis import amdahl, runs

from hpcjobs.pages import figures
from hpcjobs.scaling.analysis import analyse
from hpcjobs.scaling.page import draw_figures, draw_hosts, host_spread
from hpcjobs.sweeps import results_page

STUDIES = {
    "doubled": (1, 2, 4, 8, 16, 32, 64),
    "close together": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60, 62, 63, 64),
    "one": (1,),
    "two": (1, 2),
    "large": (256, 512, 1000, 1024),
}


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts whose bounding boxes overlap, as drawn."""
    drawn = FigureCanvasAgg(figure)
    drawn.draw()
    boxes = [(text.get_text(), text.get_window_extent(drawn.get_renderer())) for text in _texts(figure)]
    return [(a, b) for (a, first), (b, second) in combinations(boxes, 2) if first.overlaps(second)]


def _texts(figure: Figure) -> list[Text]:
    """Every text that is drawn: of the tick labels those within their axis, as matplotlib keeps others too."""
    ticks: dict[Text, bool] = {}
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                ticks |= dict.fromkeys((tick.label1, tick.label2), low <= tick.get_loc() <= high)
    return [
        text for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_visible() and text.get_text().strip() and ticks.get(text, True)
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("name", STUDIES)
def test_labels_do_not_overlap(name: str, mode: str) -> None:
    of_size = amdahl(0.02, *STUDIES[name]) if mode == "strong" else {n: 100.0 * n**0.97 for n in STUDIES[name]}
    table = runs(of_size)
    for kind, figure in draw_figures(analyse(table), table).items():
        assert overlaps(figure) == [], kind


def test_the_smallest_sizes_have_labels_of_their_own() -> None:
    """On a linear axis from 1 to 64 the labels 1 and 2 ran into each other."""
    table = runs(amdahl(0.02, *STUDIES["doubled"]))
    (axes,) = draw_figures(analyse(table), table)["speedup"].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(n) for n in STUDIES["doubled"]]


def with_a_slow_host(hosts: int) -> pl.DataFrame:
    """Runs over four hosts each; those with ``n3`` take twice as long."""
    groups = [[f"n{(start + k) % hosts + 1}" for k in range(4)] for start in range(hosts)]
    table = runs({4: 100.0})
    rows = [
        table.to_dicts()[0] | {"node_list": ",".join(group), "throughput": 50.0 if "n3" in group else 100.0}
        for group in groups
    ]
    return pl.DataFrame(rows, schema=table.schema)


def test_a_slow_host_stands_out_among_the_hosts_of_its_runs() -> None:
    """Its runs hold seven hosts, of which six have been in a fast run too."""
    hosts = host_spread(with_a_slow_host(16), per="nodes")
    assert [one.host for one in hosts if one.slow] == ["n3"]
    assert hosts[0].host == "n3"
    (axes,) = draw_hosts(hosts).axes
    assert axes.get_yticklabels()[0].get_text() == "n3 (slow)"


def test_hosts_are_in_the_order_of_their_numbers() -> None:
    table = runs({16: 100.0})  # on n[1-16]
    assert [one.host for one in host_spread(table, per="nodes")] == [f"n{number}" for number in range(1, 17)]


def test_the_smallest_and_the_largest_of_crowded_values_have_labels() -> None:
    """Of a loss the smallest is the best."""
    assert figures.choose_labels([0.0, 0.01, 0.02, 0.5, 0.99, 1.0]) == [0, 3, 5]


@pytest.mark.parametrize("hosts", [4, 16, 64, 400])
def test_every_host_has_a_row_of_its_own(hosts: int) -> None:
    assert overlaps(draw_hosts(host_spread(with_a_slow_host(hosts), per="nodes"))) == []


@pytest.mark.parametrize("text", ["$a$", "cost $", "$HOME/$USER", r"\$x$"])
def test_a_dollar_in_a_parameter_is_a_dollar(text: str, tmp_path: Path) -> None:
    """Between two of them matplotlib reads mathematics, and refuses what is none."""
    rows = [
        {text: f"{text}_{{{n}", "loss": float(n), "state": "COMPLETED", "elapsed_s": 1.0, "nodes": "n1",
         "job_id": str(n), "cell": str(n), "folder": "/c"}
        for n in range(3)
    ]  # fmt: skip
    written = results_page.write("s", rows, [text], tmp_path, compared=rows, metric="loss", largest=False)
    assert any(path.suffix == ".png" for path in written)
    assert figures.escape_math(text).count(r"\$") >= text.count("$")


@pytest.mark.parametrize(
    "labels",
    [
        ["PREEMPTED", "FAILED", "COMPLETED", "TIMEOUT"],
        [f"node{number:02}" for number in range(1, 9)],
        ["launcher=srun", "launcher=torchrun, cpus_per_task=8, container=pytorch-24.10-cuda12, mode=reduced"],
        ["one"],
    ],
)
def test_a_legend_is_no_wider_than_its_picture(labels: list[str]) -> None:
    figure, axes = figures.new_figure()
    for label in labels:
        axes.plot([1, 2], [1, 2], label=label)
    figures.add_legend(figure)
    FigureCanvasAgg(figure).draw()
    box = figure.legends[0].get_window_extent()
    assert (box.x0 >= 0, box.x1 <= figure.bbox.width, box.y0 >= 0) == (True, True, True)
    assert "".join(text.get_text() for text in figure.legends[0].get_texts()).replace("\n", " ") == "".join(labels)


def test_laws_of_runs_that_do_not_scatter_are_not_drawn_as_excluded() -> None:
    alike = runs({1: 100.0, 2: 200.0, 4: 400.0}).with_columns(throughput=pl.col("nodes") * 100.0)
    axes = draw_figures(analyse(alike), alike)["speedup"].axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert "Amdahl" in labels
    assert not [label for label in labels if "excluded" in label]
