"""Shared parts of all figures: style, labels that do not run into each other, files."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from hpcjobs.pages import save_file

INK: Final = "#1c2430"
BEHIND: Final = "#fefefe"
"""Colours of text and background; a page replaces these and the line colours (`_ON_PAGE`)."""
GREY: Final = "#8a8f98"
COLOURS: Final = ("#1f5fa8", "#c2571a", "#2c7a4b", "#7a3fa0", "#b08900", "#2a8fa0", "#b5446e", GREY)
"""Lines and areas: the page's --c0 to --c7, which have lighter shades on a dark page."""
_ON_PAGE: Final = {INK: "var(--ink)", BEHIND: "var(--page)"} | {
    colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)
}
_WIDTH: Final = 4.8
_LEGEND_SIZE: Final = 9.5
"""Letter size of a legend, in points."""
_LEGEND_LINE: Final = 0.2
"""Height of a line of a legend, in inches."""
_LEGEND_SHARE: Final = 0.93
"""Share of a figure's width that a legend may fill: the letters of a browser may be wider."""
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",  # text stays text: smaller files, and a page can be searched
    "svg.hashsalt": "hpcjobs",  # the same study gives the same file
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "axes.prop_cycle": cycler(color=COLOURS),
    "figure.facecolor": "none",
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GREY,
}
mpl.rcParams.update(_STYLE)
_NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def new_figure(*, width: float = _WIDTH, height: float = 3.1) -> tuple[Figure, Axes]:
    """An empty figure in the style of the reports; ``width`` and ``height`` in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Axes) -> None:
    """Axes on the left and below, and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)


def add_legend(figure: Figure) -> None:
    """Add a legend below the axes, so that it covers no data; the figure grows by its lines."""
    (axes, *_) = figure.axes
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        room = figure.get_figwidth() * 72 * _LEGEND_SHARE
        columns = next((count for count in range(len(labels), 1, -1) if _legend_width(labels, count) <= room), 1)
        if columns == 1:
            labels = [_break_label(label, room) for label in labels]
        lines = max(sum(label.count("\n") + 1 for label in part) for part in _split_columns(labels, columns))
        figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * lines)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=_LEGEND_SIZE)


def _split_columns(labels: Sequence[str], count: int) -> list[list[str]]:
    """Split labels as matplotlib does: the first columns are longer by one."""
    return [part.tolist() for part in np.array_split(np.array(labels, object), count)]


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """Width in points: a handle of 2.8 letters before each label, 2 letters between columns."""
    widest = [max(map(_text_width, part)) for part in _split_columns(labels, columns)]
    return sum(widest) + _LEGEND_SIZE * (2.8 * columns + 2 * (columns - 1) + 0.8)


def _text_width(text: str) -> float:
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=_LEGEND_SIZE), ismath=False)
    return float(width)


def _break_label(label: str, room: float) -> str:
    width = _legend_width([label], 1)
    return label if width <= room else textwrap.fill(label, max(12, int(len(label) * room / width) - 2))


def escape_math(text: str) -> str:
    """Escape ``$``: matplotlib reads text between two of them as mathematics."""
    return text.replace("$", r"\$")


def choose_labels(places: Sequence[float], *, gap: float = 0.07) -> list[int]:
    """Indices of the ascending ``places`` to label, ``gap`` of the axis apart, with the first and the last."""
    least = gap * (places[-1] - places[0])
    chosen = [len(places) - 1]
    for index in range(len(places) - 2, -1, -1):
        if places[chosen[-1]] - places[index] >= least:
            chosen.append(index)
    chosen[-1] = 0  # if the first has no room, it takes the place of its neighbour
    return chosen[::-1]


def to_svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element in the colours of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA, transparent=True)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    return re.sub("|".join(_ON_PAGE), lambda colour: _ON_PAGE[colour[0]], svg)


def save(made: dict[str, Figure], folder: Path) -> list[Path]:
    """Write NAME.png and NAME.svg of each figure; return their paths."""
    written = []
    for name, figure in made.items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            buffer, metadata = io.BytesIO(), _NO_METADATA if kind == "svg" else None
            figure.savefig(buffer, format=kind, dpi=150, metadata=metadata, facecolor="white")
            save_file(path, buffer.getvalue())
            written.append(path)
    return written
