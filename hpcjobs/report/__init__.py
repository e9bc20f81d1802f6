"""What came out: accounting as a table, scaling studies, advice. Needs the extra ``report``."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcjobs.report.accounts import accounting

_WHERE = {"accounting": "hpcjobs.report.accounts"}
__all__ = ["accounting"]


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hpcjobs.report' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
