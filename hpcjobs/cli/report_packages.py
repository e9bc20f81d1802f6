"""Packages that reports need, which an installation without ``hpcjobs[report]`` does not have."""

from __future__ import annotations

from importlib.util import find_spec

from hpcjobs.errors import HpcJobsError


def require_packages(*names: str) -> None:
    """Raises HpcJobsError, which says how to install them, where packages are missing."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise HpcJobsError(f"this report needs {' and '.join(missing)}", hint="pip install 'hpcjobs[report]'")
