"""Says which extra of hpcjobs a missing package belongs to."""

from __future__ import annotations

from importlib.util import find_spec

from hpcjobs.errors import HpcJobsError


def require_packages(*names: str, purpose: str = "this report") -> None:
    """Raise HpcJobsError with the install command if packages are missing.

    numpy, which the packages of the extra `report` build on except polars, is looked for with them.
    """
    packages = (*names, "numpy") if {"pandas", "scipy", "matplotlib"} & {*names} else names
    if missing := [name for name in packages if find_spec(name) is None]:
        raise HpcJobsError(f"{purpose} needs {' and '.join(missing)}", hint="pip install 'hpcjobs[report]'")
