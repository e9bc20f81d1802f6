"""Shell lines that give a node the site's software: modules, conda or venv, the site's own lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from hpcjobs.site.models import Environment, Site

# A batch shell is no login shell: `module` is often undefined in it until the init file is read.
_MODULE_INIT = (
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/modules.sh",
    "/usr/share/lmod/lmod/init/bash",
    "/usr/share/modules/init/bash",
)


def prologue(site: Site, *, environment: bool = True) -> tuple[str, ...]:
    """The lines, in order; each ends the job with the name of what is missing when it fails.

    Without ``environment`` neither conda nor venv: the program has its own, in an image.
    """
    python = _environment_lines(site.environment) if environment else ()
    return (*_module_lines(site), *python, *site.setup)


def _module_lines(site: Site) -> Iterator[str]:
    if not site.modules:
        return
    yield "# What was loaded at login is here in part only; while it counts as loaded, module load does nothing."
    yield 'unset LOADEDMODULES _LMFILES_ "${!_ModuleTable@}" "${!__MODULES_LM@}"'
    if site.module_init:
        yield f"command -v module >/dev/null || . {shlex.quote(site.module_init)}"
    else:
        yield f"for _hj_init in {shlex.join(_MODULE_INIT)}; do"
        yield '    if ! command -v module >/dev/null && [ -r "$_hj_init" ]; then . "$_hj_init"; fi'
        yield "done"
    yield "command -v module >/dev/null || die 'no module command on this node: set module_init in the site file'"
    for name in site.modules:
        yield f"module load {shlex.quote(name)} || die {shlex.quote(f'module load {name} failed')}"


def _environment_lines(environment: Environment) -> Iterator[str]:
    if environment.conda is not None:
        name = shlex.quote(environment.conda)
        if environment.conda_init is not None:
            yield f". {shlex.quote(environment.conda_init)}"
        else:
            yield "command -v conda >/dev/null || die 'no conda on this node: set environment.conda_init'"
            yield 'eval "$(conda shell.bash hook)"'
        message = shlex.quote(f"conda environment {environment.conda} cannot be activated")
        yield f"conda activate {name} || die {message}"
    if environment.venv is not None:
        activate = shlex.quote(f"{environment.venv}/bin/activate")
        message = shlex.quote(f"no virtual environment at {environment.venv}")
        yield f"if [ -r {activate} ]; then . {activate}; else die {message}; fi"
