"""Outputs of sacct in the shapes of Slurm 20.11 to 26.05, with the answers that were computed by hand beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from sacct_versions import DATA, SEPARATOR

from hpcjobs.jobstats.columns import Doubts
from hpcjobs.jobstats.derive import derive, merge_attempts, number_uses
from hpcjobs.jobstats.fold import fold
from hpcjobs.jobstats.sources import frames
from hpcjobs.record.state import State
from hpcjobs.scheduler.slurm.parse import Table
from hpcjobs.site.models import Partition, Site
from hpcjobs.site.partition import NodeShape

SHAPES = sorted((DATA / "shapes").glob("*.txt"))
SITE = Site(name="uni", partitions={"compute": Partition(nodes=8, node=NodeShape(cpus=64, mem="512G"))})


def read(path: Path) -> tuple[tuple[str, ...], bytes, list[str]]:
    """Columns, the output with an unguessable separator, and the lines of answers."""
    output, _, answers = path.read_text(encoding="utf-8").partition("\n---\n")
    _, columns, *rows = output.split("\n")
    return (
        tuple(columns.split("|")),
        "".join(f"{row}\n" for row in rows).replace("|", SEPARATOR).encode(),
        answers.splitlines(),
    )


def jobs_of(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    columns, output, _ = read(path)
    doubts = Doubts()
    attempts = pl.concat(list(fold(frames([output], Table(columns, SEPARATOR), doubts), doubts)))
    jobs = merge_attempts(number_uses(derive(attempts, SITE)))
    return {row["job_id"]: row for row in jobs.to_dicts()}, {one.kind: one.rows for one in doubts.by_frequency()}


def value_of(text: str) -> Any:
    """A number, null, or the text."""
    if text == "null":
        return None
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_the_jobs_of_an_output_are_those_computed_by_hand(path: Path) -> None:
    jobs, doubts = jobs_of(path)
    answers, counts = read(path)[2], dict[str, int]()
    for line in answers:
        job, *pairs = line.partition("#")[0].split()
        for name, _, text in (pair.partition("=") for pair in pairs):
            if job == "doubts":
                counts[name.replace("_", " ")] = int(text)
                continue
            expected, computed = value_of(text), jobs[job][name]
            if isinstance(expected, float) and isinstance(computed, int | float):
                assert computed == pytest.approx(expected, rel=1e-9), (job, name)
            else:
                assert str(computed) == text if isinstance(computed, str) else computed == expected, (job, name)
    assert {line.split()[0] for line in answers} - {"doubts"} == set(jobs)
    assert doubts == counts


def test_there_are_thirty_from_20_11_to_26_05_and_every_state_has_a_member() -> None:
    versions = {path.stem.split("-")[1] for path in SHAPES}
    assert len(SHAPES) == 30
    assert {"20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05"} == versions
    states = {job["state"] for path in SHAPES for job in jobs_of(path)[0].values()}
    spellings = set()
    for path in SHAPES:
        columns, output, _ = read(path)
        spellings |= {row.split(SEPARATOR)[columns.index("State")] for row in output.decode().split("\n")[:-1]}
    assert states | {State.parse(text).value for text in spellings} == {state.value for state in State}
