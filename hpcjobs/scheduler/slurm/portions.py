"""Splits many job ids into as many commands as needed: one argument of a program holds 128 KiB on Linux."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcjobs.job.array import task_ids

_MOST_CHARS = 100_000


def split_ids(job_ids: Iterable[str]) -> Iterator[list[str]]:
    """``job_ids`` in their order, in portions whose ids, joined by commas, fit into one argument."""
    portion: list[str] = []
    length = 0
    for job_id in job_ids:
        for part in [job_id] if len(job_id) < _MOST_CHARS else task_ids(job_id):
            if length + len(part) >= _MOST_CHARS:
                yield portion
                portion, length = [], 0
            portion.append(part)
            length += len(part) + 1
    if portion:
        yield portion
