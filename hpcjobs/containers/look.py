"""Inspects an image by running a few lines of Python in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec

from hpcjobs.containers.images import ImageFacts, expand_path
from hpcjobs.errors import CommandMissingError, HpcJobsError
from hpcjobs.files import cache_dir
from hpcjobs.processes.programs import Result, Runner, run
from hpcjobs.site.models import Site

_LEAST = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def least_driver(cuda: str) -> str | None:
    """``12.4`` -> ``525.60.13``; None: a version that is not known here."""
    major = cuda.split(".")[0]
    return _LEAST.get(int(major)) if major.isdigit() else None


def as_numbers(version: str) -> tuple[int, ...]:
    """``525.60.13`` -> (525, 60, 13), to compare by."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


_PROBE = Path(__file__).with_name("probe.py")
_TAIL_LINES = 8
INSTALLED = "apptainer/bin/apptainer"
"""Path of containers/install_apptainer.sh's Apptainer, below the cache folder of the machine or the user."""
PACKAGE = "/opt/hpcjobs"
"""Folder in an image that is on PYTHONPATH; this package is bound below it."""


def program_here(site: Site) -> str:
    """The runtime's program on this machine: the site's, then one in PATH, then the one that our script installed."""
    runtime = "apptainer" if site.containers.runtime in ("pyxis", "none") else site.containers.runtime
    if site.containers.program is not None or shutil.which(runtime):
        return site.containers.program or runtime
    caches = (Path("/var/cache/hpcjobs"), cache_dir())
    installed = [path for cache in caches if os.access(path := cache / INSTALLED, os.X_OK)]
    return str(installed[0]) if installed else runtime


def program_there(site: Site) -> str:
    """The runtime's program for a job: by name on nodes that are not this machine."""
    here = not site.kind.has_nodes or site.rehearsal
    return program_here(site) if here else site.containers.program or site.containers.runtime


def inside(
    site: Site, image: str, arguments: list[str], *, binds: tuple[str, ...] = (), runner: Runner = run
) -> Result:
    """Run ``arguments`` in ``image`` with ``binds`` and the site's binds that exist here, without home and environment.

    Raises:
        CommandMissingError: the runtime is not on this machine.
    """
    of_site = [expand_path(bind, site, "containers.binds") for bind in site.containers.binds]
    here = [bind for bind in of_site if os.path.exists(bind.split(":")[0])]
    seen = [arg for bind in (*here, *binds) for arg in ("--bind", bind)]
    try:
        return runner(
            [program_here(site), "--quiet", "exec", "--no-home", "--cleanenv", "--pwd", "/", *seen, image, *arguments]
        )
    except CommandMissingError as error:
        raise CommandMissingError(
            f"{program_here(site)}: not found here",
            hint="module load it, or set containers.program in the site file; or look on a node: --submit",
        ) from error


def look(site: Site, image: str, *, runner: Runner = run) -> ImageFacts:
    """The versions of the software in ``image``.

    Raises:
        HpcJobsError: it does not start, or has no Python; with the last lines that were printed.
    """
    python = site.containers.python
    done = inside(site, image, [python, "-c", _PROBE.read_text(encoding="utf-8")], runner=runner)
    if done.code != 0:
        raise HpcJobsError(f"image {image}: {output_tail(done)}", hint=hint_for(done, site))
    return msgspec.json.decode(done.out.strip().splitlines()[-1], type=ImageFacts)


def output_tail(done: Result) -> str:
    """The last lines of a run that failed."""
    lines = (done.err.strip() or done.out.strip() or f"exit code {done.code}").splitlines()
    return "\n  ".join(lines[-_TAIL_LINES:])


def hint_for(done: Result, site: Site) -> str | None:
    """The fix for a common error at the start of an image; None for other errors."""
    text = done.err
    for sign, hint in (
        ("executable file not found", f"the image has no {site.containers.python}: set containers.python"),
        ("squashfuse", "an ordinary user needs squashfuse on this machine, or Apptainer's setuid installation"),
        (
            "user namespace",
            "this machine lets no ordinary user make namespaces: ask for kernel.unprivileged_userns_clone=1",
        ),
        ("magic number", "the file is damaged: build or copy it again"),
        ("unsquash", "the file is damaged: build or copy it again"),
        ("mount source", "a folder that is to be bound is not on this machine"),
    ):
        if sign in text:
            return hint
    return None
