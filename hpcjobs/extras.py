"""Says which extra of hpcjobs a missing package belongs to."""

from __future__ import annotations

from importlib.util import find_spec

from hpcjobs.errors import HpcJobsError


def require_packages(*names: str, extra: str = "report", purpose: str = "this report") -> None:
    """Raise HpcJobsError with the install command if packages are missing."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise HpcJobsError(f"{purpose} needs {' and '.join(missing)}", hint=f"pip install 'hpcjobs[{extra}]'")
