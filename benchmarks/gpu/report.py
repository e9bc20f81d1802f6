"""gpu-report/: report.json, report.md and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.steps import Figures, Outcome
from hpcjobs.files import write_beside

LEAST_DRAWN = 1e-9
"""Where the picture, whose axis is logarithmic, shows losses that are equal."""


def write_report(
    folder: Path, machine: Mapping[str, Any], outcomes: Sequence[Outcome], pictures: Sequence[Path] = ()
) -> None:
    """Rewritten after each step: an interrupted run leaves what it has."""
    document = {"schema": "hpcjobs.gpu-report/1", "machine": machine, "steps": [asdict(one) for one in outcomes]}
    write_beside(folder / "report.json", json.dumps(document, indent=1) + "\n", mode=None)
    write_beside(folder / "report.md", format_report(machine, outcomes, pictures), mode=None)


def format_report(machine: Mapping[str, Any], outcomes: Sequence[Outcome], pictures: Sequence[Path] = ()) -> str:
    verdicts = [one.verdict for one in outcomes]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "failed", "not run"))
    rehearsal = "A rehearsal on a CPU: nothing here was measured on a GPU.\n\n" if machine["rehearsal"] else ""
    facts = "".join(f"- {name}: {value}\n" for name, value in machine.items() if name != "rehearsal")
    rows = "".join(
        f"| {one.name} | {one.about} | {one.verdict} | {format_figures(one)} | {one.seconds:.1f} |\n"
        for one in outcomes
    )
    header = "| step | what is checked | verdict | figures, or the reason | s |\n|---|---|---|---|---|\n"
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in pictures if path.suffix == ".png")
    return f"# Report of the GPU path\n\n{rehearsal}{counts}.\n\n{facts}\n{header}{rows}{shown}"


def format_figures(outcome: Outcome) -> str:
    texts = outcome.problems or list(describe_figures(outcome.figures))
    return "; ".join(texts).replace("\n", " ").replace("|", "\\|")


def describe_figures(figures: Figures) -> Iterator[str]:
    """What a step measured, in words; report.json has all of it."""
    if "largest_deviation" in figures:
        yield f"losses differ by at most {figures['largest_deviation']:.2g} (allowed: {figures['tolerance']:g})"
    if figures.get("resumed_from_step") is not None:
        yield f"resumed from step {figures['resumed_from_step']}"
    if "peak_bytes" in figures:
        yield f"peak {figures['peak_bytes'] / 1e9:.3g} GB"
        if figures["judged"]:
            yield f"expected at most {figures['expected_at_most_bytes'] / 1e9:.3g} GB"
    if "of_plain" in figures:
        judged = "" if figures["least_of_plain"] else " (not judged)"
        yield f"{figures['of_plain']:.2f} of the plain loop's speed{judged}"
        yield f"{figures['throughput']:.4g} {figures['unit']}"
    if figures.get("mfu") is not None:
        yield f"MFU {figures['mfu']:.2f}"
    for kernel, rate in figures.get("gflops", {}).items():
        yield f"{kernel} {rate:,.0f} GFLOP/s"
    for key, name in (("of_cublas", "fp32"), ("of_cublas_bf16", "bf16")):
        if figures.get(key) is not None:
            yield f"{figures[key]:.2f} of cuBLAS in {name}"
    if "uses" in figures:
        yield from describe_kernels(figures["uses"])
    if "report" in figures:
        yield from describe_node(figures["report"])
    if "message" in figures:
        yield f"exit code {figures['code']}"
        yield figures["message"].partition(" Hint: ")[0]
    if "nccl" in figures:
        names = {"nccl": "NCCL", "mpi": "MPI", "gloo": "Gloo"}
        yield "built with " + " and ".join(name for key, name in names.items() if figures[key])


def describe_kernels(uses: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kernel in dict.fromkeys(use["kernel"] for use in uses):
        own = [use for use in uses if use["kernel"] == kernel]
        registers, shared = [use["registers"] for use in own], own[0]["shared_bytes"]
        yield (
            f"{kernel}: {min(registers)} to {max(registers)} registers, {shared:,} bytes of shared memory "
            f"(sm_{own[0]['architecture']} to sm_{own[-1]['architecture']})"
        )


def describe_node(report: Mapping[str, Any]) -> Iterator[str]:
    for node in report["nodes"]:
        yield f"{node['host']}: {node['verdict']}"
    for gpu in report["gpus"]:
        yield (
            f"GPU {gpu['index']} ({gpu['name']}): {gpu['flops'] / 1e12:.4g} TFLOP/s in bf16 or fp16, "
            f"memory {gpu['memory_bytes_per_s'] / 1e9:.4g} GB/s"
        )


def draw(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """losses.png: how far losses are from the CPU's; speed.png: speed as a share of the plain loop's."""
    from hpcjobs.pages.figures import new_figure, save

    made = {}
    by_name: dict[str, Figures] = {one.name: one.figures for one in outcomes if one.figures}
    curves = {name: figures for name, figures in by_name.items() if "cpu_losses" in figures}
    if curves:
        figure, axes = new_figure()
        for name, figures in curves.items():
            pairs = zip(figures["losses"], figures["cpu_losses"], strict=True)
            off = [max(LEAST_DRAWN, abs(mine - theirs) / abs(theirs)) for mine, theirs in pairs]
            axes.plot(range(1, len(off) + 1), off, linewidth=1, marker=".", label=name.removeprefix("losses-"))
        for tolerance in sorted({figures["tolerance"] for figures in curves.values()}):
            axes.axhline(tolerance, color="black", linewidth=1, linestyle="--")
        axes.set_yscale("log")
        axes.set_ylim(top=100)  # room for the legend
        axes.set_xlabel("step; dashed: what is allowed")
        axes.set_ylabel(f"relative deviation from the CPU's loss ({LEAST_DRAWN:g}: none)")
        axes.legend(fontsize=8, frameon=False, loc="upper right", ncols=3)
        made["losses"] = figure
    speeds = {name: figures for name, figures in by_name.items() if "of_plain" in figures}
    if speeds:
        figure, axes = new_figure()
        axes.barh([name.removeprefix("speed-") for name in speeds], [one["of_plain"] for one in speeds.values()])
        axes.axvline(1.0, color="black", linewidth=1)
        judged = all(one["least_of_plain"] for one in speeds.values())
        axes.set_xlabel(
            "speed of ddp, as a share of the plain loop's" + ("" if judged else " (a rehearsal: not judged)")
        )
        made["speed"] = figure
    return save(made, folder)
