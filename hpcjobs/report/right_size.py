"""Advice for jobs submitted with hpcjobs, and for studies."""

from __future__ import annotations

from hpcjobs.report import points, study
from hpcjobs.report.advice import Advice, advise
from hpcjobs.report.gather import Wanted, gather
from hpcjobs.report.scaling import Analysis, analyse
from hpcjobs.run.select import select


def right_size(words: list[str], *, site: str | None = None) -> dict[str, list[Advice]]:
    """Job id, or name of a study -> what to ask for next time.

    Raises:
        UnknownJobError: a word names no job and no study.
    """
    told: dict[str, list[Advice]] = {}
    for word in words:
        if study.path_of(word).is_file():
            asked = study.read(study.path_of(word))
            runs = points.points(asked)
            told[asked.name] = of_study(analyse(runs, mode=asked.mode, allow_mixed=True))
            continue
        for entry in select([word], site=site):
            found = gather(Wanted(since=0, job_ids=(entry.job_id,)), site=entry.site).jobs
            for row in found.to_dicts():
                told[row["job_id"]] = advise(row)
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
