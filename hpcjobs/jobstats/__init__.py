"""Reads the jobs of a site as a table, from sacct or substitutes; totals and advice. Needs the extra ``report``."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcjobs.jobstats.dataframe import read_jobs

_WHERE = {"read_jobs": "hpcjobs.jobstats.dataframe"}
__all__ = ["read_jobs"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hpcjobs.jobstats' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
