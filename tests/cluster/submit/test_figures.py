"""Figures of merit that a job's log has, on a real Slurm: labelled ranks of several nodes, a requeue, a study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commandline import hpcjobs

from hpcjobs.sandbox import Sandbox

METRIC = ("--metric", r"^rate ([\d.]+) it/s")


def summary_of(run_dir: str | Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((Path(run_dir) / "summary.json").read_text(encoding="utf-8"))
    return summary


def test_lines_of_labelled_ranks_on_two_nodes_are_read(sandbox: Sandbox, workdir: Path) -> None:
    """``srun --label`` puts the rank before each line."""
    program = Path("rate.sh")
    program.write_text('#!/bin/bash\necho "rate $((100 + RANK)) it/s"\n')
    program.chmod(0o755)
    submitted = hpcjobs("submit", "--site", "tu-hpc", "-N", "2", *METRIC, "--json", "./rate.sh").json
    assert hpcjobs("wait", submitted["job_id"]).code == 0
    figure = summary_of(submitted["run_dir"])["figures"]["it/s"]
    assert (figure["readings"], figure["least"], figure["most"], figure["value"]) == (2, 100, 101, 100.5)


def test_a_requeued_job_has_the_figures_of_its_last_attempt(sandbox: Sandbox, workdir: Path) -> None:
    """The log of both attempts is one file."""
    program = Path("again.sh")
    program.write_text(
        '#!/bin/bash\necho "rate $((1 + SLURM_RESTART_COUNT)) it/s"\n[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || exit 85\n'
    )
    program.chmod(0o755)
    submitted = hpcjobs("submit", "--site", "tu-hpc", "--retries", "on", *METRIC, "--json", "./again.sh").json
    assert hpcjobs("wait", submitted["job_id"]).code == 0
    summary = summary_of(submitted["run_dir"])
    assert (summary["status"], summary["figures"]["it/s"]["least"], summary["figures"]["it/s"]["value"]) == (
        "completed", 2, 2,
    )  # fmt: skip


def test_a_study_over_threads_is_measured_by_what_the_program_prints(sandbox: Sandbox, workdir: Path) -> None:
    program = ("sh", "-c", 'test "$RANK" != 0 || echo "rate $((1000 * {ranks} * OMP_NUM_THREADS)) it/s"')
    answer = hpcjobs("scale", "--site", "tu-hpc", "-N", "1,2", "--over", "cpus-per-task=1,2", "--repeats", "2",
                     "--name", "threads", *METRIC, "--no-check", "--wait", *program)  # fmt: skip
    assert answer.code == 0, answer
    checks = ("--check", "efficiency>=0.99 at 2", "--check", "throughput>=1999 at 2")
    report = hpcjobs("report", "scaling", "threads", *checks, "--json")
    assert report.code == 0, report
    series = {one["series"]: one["groups"] for one in report.json["series"]}
    assert {name: [round(group["throughput"]["value"]) for group in groups] for name, groups in series.items()} == {
        "cpus_per_task=1": [1000, 2000],
        "cpus_per_task=2": [2000, 4000],
    }
