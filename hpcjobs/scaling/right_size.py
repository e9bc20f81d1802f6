"""Advice for jobs submitted with hpcjobs, and for studies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hpcjobs.accounting.advice import Advice, advise
from hpcjobs.accounting.sources import JobFilter, gather
from hpcjobs.accounting.start_times import StartEstimates, estimate_starts
from hpcjobs.run.select import select
from hpcjobs.scaling import study
from hpcjobs.scaling.analysis import Analysis, analyse
from hpcjobs.scaling.run_list import list_runs
from hpcjobs.scaling.runs import read_runs
from hpcjobs.scaling.study import Study


class RightSize(NamedTuple):
    """What to ask for next time, and what that does to the wait."""

    advice: list[Advice]
    starts: StartEstimates | None
    """None: nothing to change, or Slurm cannot tell."""


def right_size(names: list[str], *, site: str | None = None) -> dict[str, RightSize]:
    """Job id, or name of a study -> what to ask for next time.

    Raises:
        UnknownJobError: a name is of no job and no study.
    """
    results: dict[str, RightSize] = {}
    for name in names:
        if os.path.isfile(study.path_of(name)):
            measured_study = study.read(study.path_of(name))
            analysis = analyse(read_runs(measured_study), mode=measured_study.mode, allow_mixed=True)
            results[measured_study.name] = RightSize(
                advise_nodes(analysis), _estimate_study_starts(measured_study, analysis)
            )
            continue
        for entry in select([name], site=site):
            for row in gather(JobFilter(since=0, job_ids=(entry.job_id,)), site=entry.site).jobs.to_dicts():
                advice = advise(row)
                options = [f"{one.option}={one.value}" for one in advice]
                results[row["job_id"]] = RightSize(advice, estimate_starts(Path(entry.run_dir), options))
    return results


def advise_nodes(analysis: Analysis) -> list[Advice]:
    """The nodes (or ranks) up to which the work is done at the target efficiency."""
    knee = analysis.knee
    if knee.measured is None:
        return []
    at = next(group for group in analysis.groups if group.n == knee.measured)
    option = "--nodes" if analysis.per == "nodes" else "--ntasks-per-node"
    reason = f"{at.efficiency.value:.0%} efficient at {knee.measured} {analysis.per}"
    later = [group for group in analysis.groups if group.n > knee.measured]
    if later:
        reason += f", {later[0].efficiency.value:.0%} at {later[0].n}"
    return [Advice(option, str(knee.measured), reason)]


def _estimate_study_starts(measured_study: Study, analysis: Analysis) -> StartEstimates | None:
    """The largest size measured, against the one that is advised."""
    largest, knee = analysis.groups[-1], analysis.knee.measured
    at = next((group for group in analysis.groups if group.n == knee and group is not largest), None)
    if at is None:
        return None
    job_dir = next(run.job_dir for run in list_runs(measured_study) if run.job_dir and run.size.ranks == largest.ranks)
    return estimate_starts(Path(job_dir), [f"--nodes={at.nodes}", f"--ntasks-per-node={at.ranks // at.nodes}"])
