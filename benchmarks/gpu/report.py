"""gpu-report/: report.json, report.md and pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.steps import Figures, Outcome
from hpcjobs.files import write_beside

SHOWN = (
    "largest_deviation",
    "of_plain",
    "mfu",
    "of_cublas",
    "of_cublas_bf16",
    "peak_bytes",
    "shards_bytes",
    "resumed_from_step",
    "code",
)
"""Figures that the table has, where a step measured them."""


def write_report(folder: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Rewritten after each step: an interrupted run leaves what it has."""
    document = {"schema": "hpcjobs.gpu-report/1", "machine": machine, "steps": [asdict(one) for one in outcomes]}
    write_beside(folder / "report.json", json.dumps(document, indent=1) + "\n", mode=None)
    write_beside(folder / "report.md", format_report(machine, outcomes), mode=None)


def format_report(machine: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    rehearsal = "\nA rehearsal on a CPU: nothing here was measured on a GPU.\n" if machine["rehearsal"] else ""
    rows = "".join(f"| {one.name} | {one.verdict} | {format_figures(one)} | {one.seconds:.1f} |\n" for one in outcomes)
    abouts = "\n".join(f"- `{one.name}`: {one.about}." for one in outcomes)
    header = "| step | verdict | figures, or the reason | s |\n|---|---|---|---|\n"
    return f"# Report of the GPU path\n{rehearsal}\n{facts}\n\n{header}{rows}\n{abouts}\n"


def format_figures(outcome: Outcome) -> str:
    if outcome.problems:
        return "; ".join(outcome.problems).replace("\n", " ").replace("|", "\\|")
    return ", ".join(
        f"{name} {format_value(outcome.figures[name])}" for name in SHOWN if outcome.figures.get(name) is not None
    )


def format_value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """losses.png: every trainer's beside the CPU's; speed.png: trainers' speed as a share of the plain loop's."""
    from hpcjobs.pages.figures import new_figure, save

    made = {}
    by_name: dict[str, Figures] = {one.name: one.figures for one in outcomes if one.figures}
    curves = {name: figures for name, figures in by_name.items() if "losses" in figures and "mnist" not in name}
    if curves:
        figure, axes = new_figure()
        expected = next(iter(curves.values()))["cpu_losses"]
        axes.plot(range(1, len(expected) + 1), expected, color="black", linewidth=3, alpha=0.3, label="ddp on the CPU")
        for name, figures in curves.items():
            losses = figures["losses"]
            axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label=name.removeprefix("losses-"))
        axes.set_xlabel("step")
        axes.set_ylabel("loss of lm")
        axes.legend(fontsize=8, frameon=False)
        made["losses"] = figure
    speeds = {name: figures for name, figures in by_name.items() if "of_plain" in figures}
    if speeds:
        figure, axes = new_figure()
        axes.barh([name.removeprefix("speed-") for name in speeds], [one["of_plain"] for one in speeds.values()])
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xlabel("speed of ddp, as a share of the plain loop's")
        made["speed"] = figure
    return save(made, folder)
