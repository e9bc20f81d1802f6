"""Shared parts of all figures: style, labels that do not run into each other, files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpcjobs.files import naming_errors

mpl.rcParams["svg.fonttype"] = "none"  # text stays text: smaller files, and a page can be searched
mpl.rcParams["svg.hashsalt"] = "hpcjobs"  # the same study gives the same file
_NO_METADATA: Final = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def new_figure(*, width: float = 6.4, height: float = 4.2) -> tuple[Figure, Axes]:
    """An empty figure in the style of the reports; ``width`` and ``height`` in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25)
    return figure, axes


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
    """The figure as an ``<svg>`` element."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(made: dict[str, Figure], folder: Path) -> list[Path]:
    """NAME.png and NAME.svg of each."""
    written = []
    for name, figure in made.items():
        for kind in ("png", "svg"):
            path = folder / f"{name}.{kind}"
            with naming_errors(path):
                figure.savefig(path, dpi=150, metadata=_NO_METADATA if kind == "svg" else None)
            written.append(path)
    return written
