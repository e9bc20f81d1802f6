"""Advice for jobs submitted with hpcjobs, and for studies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hpcjobs.accounting.advice import Advice, advise
from hpcjobs.accounting.sources import Wanted, gather
from hpcjobs.accounting.start_times import Starts, starts
from hpcjobs.run.select import select
from hpcjobs.scaling import study
from hpcjobs.scaling.analysis import Analysis, analyse
from hpcjobs.scaling.run_list import list_runs
from hpcjobs.scaling.runs import read_runs
from hpcjobs.scaling.study import Study


class RightSize(NamedTuple):
    """What to ask for next time, and what that does to the wait."""

    advice: list[Advice]
    starts: Starts | None
    """None: nothing to change, or Slurm cannot tell."""


def right_size(words: list[str], *, site: str | None = None) -> dict[str, RightSize]:
    """Job id, or name of a study -> what to ask for next time.

    Raises:
        UnknownJobError: a word names no job and no study.
    """
    told: dict[str, RightSize] = {}
    for word in words:
        if os.path.isfile(study.path_of(word)):
            asked = study.read(study.path_of(word))
            found = analyse(read_runs(asked), mode=asked.mode, allow_mixed=True)
            told[asked.name] = RightSize(of_study(found), _starts_of_study(asked, found))
            continue
        for entry in select([word], site=site):
            for row in gather(Wanted(since=0, job_ids=(entry.job_id,)), site=entry.site).jobs.to_dicts():
                advice = advise(row)
                options = [f"{one.option}={one.value}" for one in advice]
                told[row["job_id"]] = RightSize(advice, starts(Path(entry.run_dir), options))
    return told


def of_study(found: Analysis) -> list[Advice]:
    """The nodes (or ranks) up to which the work is done at the target efficiency."""
    knee = found.knee
    if knee.measured is None:
        return []
    at = next(group for group in found.groups if group.n == knee.measured)
    option = "--nodes" if found.per == "nodes" else "--ntasks-per-node"
    words = f"{at.efficiency.value:.0%} efficient at {knee.measured} {found.per}"
    later = [group for group in found.groups if group.n > knee.measured]
    if later:
        words += f", {later[0].efficiency.value:.0%} at {later[0].n}"
    return [Advice(option, str(knee.measured), words)]


def _starts_of_study(asked: Study, found: Analysis) -> Starts | None:
    """The largest size measured, against the one that is advised."""
    largest, knee = found.groups[-1], found.knee.measured
    at = next((group for group in found.groups if group.n == knee and group is not largest), None)
    if at is None:
        return None
    job_dir = next(run.job_dir for run in list_runs(asked) if run.job_dir and run.size.ranks == largest.ranks)
    return starts(Path(job_dir), [f"--nodes={at.nodes}", f"--ntasks-per-node={at.ranks // at.nodes}"])
