"""Examines an installation on this machine: versions, site files, Slurm, containers, folders, clocks."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from hpcjobs import __version__, slurm_commands
from hpcjobs.errors import HpcJobsError, reason_of
from hpcjobs.files import cache_dir, config_dir, state_dir, user_name
from hpcjobs.job.environment import locate_run_root
from hpcjobs.processes.programs import Runner, run
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.site.search import list_sites

_PACKAGES = ("typer", "jinja2", "msgspec", "submitit", "pyyaml", "rich")
_OPTIONAL = ("torch", "lightning", "horovod", "pandas", "textual", "jupyterlab", "hydra-core")
_QUESTIONS = (
    ("Slurm", slurm_commands.show_version()),
    ("controller", slurm_commands.ping_controller()),
    ("accounting", slurm_commands.list_clusters()),
)
_LEAST_FREE_BYTES = 1 << 30
_CLOCKS_DIFFER_S = 5.0
_MARK = "hpcjobs doctor:"
_ON_NODE = f"""import platform, time
try:
    import torch
    torch = torch.__version__ + (f", {{torch.cuda.device_count()}} GPUs" if torch.cuda.is_available() else ", no GPU")
except ImportError:
    torch = "not installed"
print("{_MARK}", time.time(), f"Python {{platform.python_version()}}, torch {{torch}}, on {{platform.node()}}")"""


class InstallationFinding(NamedTuple):
    """One line of the report."""

    subject: str
    verdict: Literal["ok", "warning", "wrong", ""]
    text: str


def examine(name: str | None = None, *, run_job: bool = False, runner: Runner = run) -> Iterator[InstallationFinding]:
    """Examine the installation and the site ``name`` [the default site]; ``run_job``: a job looks at its node too."""
    yield from _list_versions()
    entries = list_sites()
    counts = Counter(entry.layer for entry in entries if not entry.shadowed)
    yield InstallationFinding("site files", "", ", ".join(f"{number} {layer}" for layer, number in counts.items()))
    try:
        site = load_site(name or default_site())
    except HpcJobsError as error:
        yield InstallationFinding("site", "wrong", error.message)
        return
    yield InstallationFinding("site", "ok", f"{site.name}, scheduler {site.scheduler}, {site.path}")
    if site.kind.has_nodes:
        yield from (_ask(subject, argv, site, runner) for subject, argv in _QUESTIONS)
    yield _find_containers(site, runner)
    yield from _check_folders(site)
    if run_job:
        yield _look_on_node(site)


def without_names(text: str) -> str:
    """``text`` without the name of the user and of the home folder."""
    home, user = str(Path.home()), user_name()
    text = text.replace(home, "~") if home != "/" else text
    return text if user == "root" else text.replace(user, "USER")


def _list_versions() -> Iterator[InstallationFinding]:
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield InstallationFinding("hpcjobs", "", f"{__version__}, Python {platform.python_version()}, {machine}")
    for subject, names in (("packages", _PACKAGES), ("optional", _OPTIONAL)):
        yield InstallationFinding(subject, "", ", ".join(f"{name} {_version(name)}" for name in names))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _ask(subject: str, argv: Sequence[str], site: Site, runner: Runner) -> InstallationFinding:
    began = time.monotonic()
    try:
        done = runner(argv, env=slurm_commands.cluster_env(site.slurm_conf))
    except HpcJobsError as error:
        return InstallationFinding(subject, "wrong", error.message)
    text = "; ".join((done.out if done.code == 0 else done.err or done.out).split("\n")).strip("; ")
    verdict: Literal["ok", "wrong"] = "ok" if done.code == 0 else "wrong"
    return InstallationFinding(subject, verdict, f"{text} ({time.monotonic() - began:.2f} s)")


def _find_containers(site: Site, runner: Runner) -> InstallationFinding:
    programs = [path for name in ("apptainer", "singularity") if (path := shutil.which(name))]
    if not programs:
        verdict: Literal["warning", ""] = "warning" if site.containers.images else ""
        return InstallationFinding("containers", verdict, "neither apptainer nor singularity is on PATH here")
    done = runner([programs[0], "--version"])
    return InstallationFinding("containers", "ok", f"{done.out.strip()}, {programs[0]}")


def _check_folders(site: Site) -> Iterator[InstallationFinding]:
    run_root = locate_run_root(site, Path.cwd())
    folders = {"run folders": run_root, "state": state_dir(), "settings": config_dir(), "cache": cache_dir()}
    for subject, folder in folders.items():
        yield _check_folder(subject, folder)
    yield _compare_clocks(run_root if run_root.exists() else Path.cwd())


def _check_folder(subject: str, folder: Path) -> InstallationFinding:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return InstallationFinding(subject, "wrong", f"{folder}: {there} may not be written")
    free = shutil.disk_usage(there).free
    new = "" if there == folder else ", made when needed"
    verdict: Literal["ok", "warning"] = "ok" if free >= _LEAST_FREE_BYTES else "warning"
    return InstallationFinding(subject, verdict, f"{folder}{new}, {free / (1 << 30):.1f}G free")


def _compare_clocks(folder: Path) -> InstallationFinding:
    """Compare the clocks of this machine and of the file system with the run folders."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".hpcjobs-doctor-", dir=folder) as file:
            differ_s = os.stat(file.name).st_mtime - time.time()
    except OSError as error:
        return InstallationFinding("clock", "warning", f"not compared: {folder}: {reason_of(error)}")
    return InstallationFinding("clock", *_judge_clock(differ_s, "of the file system"))


def _judge_clock(differ_s: float, whose: str) -> tuple[Literal["ok", "warning"], str]:
    return "ok" if abs(differ_s) < _CLOCKS_DIFFER_S else "warning", f"the clock {whose} differs by {differ_s:+.1f} s"


def _look_on_node(site: Site) -> InstallationFinding:
    from hpcjobs.job.plan import plan
    from hpcjobs.run.submit import submit

    python = "python" if site.kind.has_nodes else sys.executable
    began = time.time()
    job = submit(plan([python, "-c", _ON_NODE], site.path, name="doctor", time="5m"))
    code = job.wait()
    line = next((line for line in job.logs().splitlines() if _MARK in line), None)
    if line is None:
        return InstallationFinding("node", "wrong", f"job {job.id} ended with {code}: hpcjobs why {job.id}")
    clock, text = line.partition(f"{_MARK} ")[2].split(" ", 1)
    differ_s = float(clock) - min(max(float(clock), began), time.time())  # 0 while the job was here
    verdict, clocks = _judge_clock(differ_s, "of the node")
    return InstallationFinding("node", verdict, f"{text}; {clocks}")
