"""MPI types, modules and container runtimes of a login node."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable

from hpcjobs.discovery.facts import Modules, Runtime

_MARK = "hpcjobs-modules"
_TIMEOUT_S = 60
_LIST_MODULES = (
    f'type module >/dev/null 2>&1 || exit 0; printf \'\\n{_MARK} %s|%s\\n\' "${{LMOD_PKG-}}" "${{MODULESHOME-}}"; '
    "module -t avail 2>&1"
)
MODULES_COMMAND = ("timeout", str(_TIMEOUT_S), "bash", "-lc", _LIST_MODULES)
"""Asks a login shell for its module system and the available modules; a profile may print before the mark."""
TOPICS = {
    "MPI": re.compile(
        r"(?i)(^|[/_-])(open-?mpi|hpcx|mpich|mvapich2?|impi|intel-?mpi|intelmpi|cray-mpich)([/._-]|\d|$)"
    ),
    "CUDA or ROCm": re.compile(r"(?i)(^|/)(cuda(toolkit)?|cudnn|nccl|nvhpc|rocm)([/._-]|\d|$)"),
    "containers": re.compile(r"(?i)(^|/)(apptainer|singularity(ce|pro)?|enroot|charliecloud|podman)([/._-]|\d|$)"),
    "Python": re.compile(
        r"(?i)(^|/)(python3?|(ana|mini)conda[23]?|mini(forge|mamba)\d?|mamba|micromamba)([/._-]|\d|$)"
    ),
}
_TYPES_LINE = re.compile(r"(?i)mpi (?:plugin )?types are")
_TYPE = re.compile(r"[a-z][\w-]*\Z", re.ASCII)


def parse_mpi_types(out: str) -> tuple[str, ...]:
    """The types of ``srun --mpi=list``: one per line, or after the colon in old versions."""
    if not _TYPES_LINE.search(out):
        return ()
    lines = (line.removeprefix("srun:").strip() for line in out.splitlines())
    return tuple(sorted({line for line in lines if _TYPE.match(line)}))


def parse_modules(out: str) -> Modules | None:
    """The module system and its modules; None: a login shell has no ``module`` command."""
    _, mark, rest = out.rpartition(f"\n{_MARK} ")
    if not mark:
        return None
    first, _, listing = rest.partition("\n")
    lmod, _, home = first.strip().partition("|")
    lines = (re.sub(r"\((default|D|L|,)+\)$", "", line.strip()) for line in listing.splitlines())
    names = tuple(
        dict.fromkeys(line for line in lines if line and line[0] not in "/-(" and not line.endswith((":", "/")))
    )
    folder = lmod or home
    return Modules(
        system="Lmod" if lmod else "Environment Modules" if home else "modules",
        init=f"{folder}/init/bash" if folder else None,
        names=tuple(name for name in names if name.isprintable() and " " not in name),
    )


def modules_of(topic: str, names: Iterable[str]) -> tuple[str, ...]:
    """The modules of one of `TOPICS`."""
    return tuple(name for name in names if TOPICS[topic].search(name))


def container_runtimes(srun_help: str) -> tuple[Runtime, ...]:
    """The container runtimes to be seen on this host, and Pyxis where srun has its options."""
    runtimes = [
        Runtime(name, f"{path} on this host") for name in ("apptainer", "singularity") if (path := shutil.which(name))
    ]
    if "--container-image" in srun_help:
        runtimes.append(Runtime("pyxis", "srun --help: --container-image"))
    return tuple(runtimes)
