"""Whether a session's Python has Jupyter, where that can be known before anything is queued."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job

_PROGRAM = """
import importlib.util as util, sys
if sys.version_info < (3, 9): print("old"); sys.exit()
print(",".join(name for name in sys.argv[1:] if util.find_spec(name) is None))
"""
_WANTED = {"lab": ("jupyterlab", "ipykernel"), "notebook": ("notebook", "ipykernel"), "code": ()}
_PATIENCE_S = 20.0


def check(job: Job, kind: str) -> None:
    """Refuse a session that its Python cannot run.

    Only a Python named by its path can be asked here, and one that does not start here may do so on a node with its
    modules: then the node says what is missing, seconds after the start.

    Raises:
        RequestError: names the Python and what it lacks.
    """
    python = Path(job.python)
    if job.container is not None or not python.is_absolute() or not os.access(python, os.X_OK):
        return
    try:
        done = subprocess.run(
            [str(python), "-c", _PROGRAM, *_WANTED[kind]], capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    lacking = done.stdout.strip()
    if done.returncode != 0 or not lacking:
        return
    if lacking == "old":
        raise RequestError(f"{python} is older than Python 3.9", hint="jupyter.python of the site file names another")
    names = lacking.replace(",", " and no ")
    raise RequestError(
        f"{python}, which site {job.site} ({job.site_file}) would run the session with, has no {names}",
        hint=f"{python} -m pip install {lacking.replace(',', ' ')}, or name another in the site file (jupyter.python)",
    )
