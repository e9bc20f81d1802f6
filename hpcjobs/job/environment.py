"""The environment of a job's processes: run root, shell files, Python, the site's software, variables, container."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template

from hpcjobs.data import data_folder
from hpcjobs.errors import RequestError
from hpcjobs.files import user_name
from hpcjobs.job.launch import Raw
from hpcjobs.job.models import Inside, Job
from hpcjobs.runtime.exits import ExitCode
from hpcjobs.site.models import Environment, Site
from hpcjobs.slurm_commands import HOST_NAMES

OTHER_ENVIRONMENTS = "`environment` (venv or conda), `modules` or `python` of the site file"
"""How a user names the Python of the jobs, for messages."""
_RECEIPTS = {"pipx_metadata.json": "pipx", "uv-receipt.toml": "uv tool"}
"""Files that installers of single programs leave in the environments that they make for each."""
SHELL_FOLDER = "shell"
"""In the run folder."""
_ALWAYS = ("common.bash", "job.bash")
MONITOR_PROGRAM = "monitor.pyz"
"""The sampler, in the run folder."""
FIGURES_PROGRAM = "figures.pyz"
"""The reader of the log, in the run folder."""


def shell_files(script: str) -> dict[str, str]:
    """Name and text of each file that ``script`` uses."""
    folder = data_folder("templates") / SHELL_FOLDER
    names = sorted(path.name for path in folder.iterdir())
    used = [name for name in names if name in _ALWAYS or f"/{name}" in script]
    return {name: (folder / name).read_text(encoding="utf-8") for name in used}


def locate_run_root(site: Site, chdir: Path) -> Path:
    """The absolute ``run_root`` of ``site`` for a job that starts in ``chdir``; links are followed to see where it is.

    Raises RequestError: a variable in it is not set here, or each node has a separate folder there.
    """
    # Cron and containers often leave USER out.
    variables = {"USER": user_name(), **os.environ}
    text = Template(os.path.expanduser(site.run_root)).safe_substitute(variables)
    if "$" in text:
        raise RequestError(f"run_root {site.run_root!r} of site {site.name} ({site.path}): variable not set here")
    root = (chdir / text).absolute()
    real = root.resolve()
    for local in site.node_local:
        if site.kind.has_nodes and (root.is_relative_to(local) or real.is_relative_to(Path(local).resolve())):
            leads = "" if real == root else f" (which leads to {real})"
            raise RequestError(
                f"run folder {root}{leads} is in {local}, which is local to each node of site {site.name}",
                hint="submit from a folder that all nodes share, or set run_root in the site file",
            )
    return root


def choose_python(site: Site) -> str:
    """The Python of programs, once the site's modules and environment are loaded."""
    if site.python is not None:
        return site.python
    # Not an absolute path: the activated environment puts its Python first in PATH.
    return "python" if site.environment.conda or site.environment.venv else sys.executable


def find_private_installer(python: str) -> str | None:
    """Tools that make an environment for hpcjobs alone, without the user's packages -> the name of ``python``'s."""
    folder = Path(python).parent.parent
    if folder.parent.name == "installed" and folder.parent.parent.name == "hpcjobs":
        return "hpcjobs --remote"
    return next((name for file, name in _RECEIPTS.items() if (folder / file).is_file()), None)


def choose_node_python(site: Site) -> str:
    """The Python of a node that needs neither modules nor an activated environment."""
    if site.node_python is not None:
        return site.node_python
    if not site.kind.has_nodes:
        return sys.executable
    environment = site.environment.venv or site.environment.conda
    named = site.python if site.python is not None or environment is None else f"{environment}/bin/python"
    return named if named is not None and os.path.isabs(named) else "/usr/bin/python3"


# A batch shell is not a login shell: `module` is often undefined until the init file is read.
_MODULE_INIT = (
    "/etc/profile.d/lmod.sh",
    "/etc/profile.d/modules.sh",
    "/usr/share/lmod/lmod/init/bash",
    "/usr/share/modules/init/bash",
)


def prologue(site: Site, *, environment: bool = True) -> tuple[str, ...]:
    """Return the lines, in order; each ends the job with the name of the missing item if it fails.

    Without ``environment`` neither conda nor venv: the program has Python in its image.
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


_RANKS = frozenset(("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
_OURS = frozenset(
    (
        *("HPCJOBS_ATTEMPTS_PID", "HPCJOBS_CELL", "HPCJOBS_CONTROL_DIR", "HPCJOBS_DEADLINE", "HPCJOBS_IFNAME"),
        *("HPCJOBS_IMAGE", "HPCJOBS_JOB_ID", "HPCJOBS_LANES", "HPCJOBS_LAUNCHED_BY", "HPCJOBS_NNODES"),
        *("HPCJOBS_NTASKS", "HPCJOBS_NTASKS_PER_NODE", "HPCJOBS_PACK", "HPCJOBS_RUN_DIR", "HPCJOBS_SCHEDULER"),
        "HPCJOBS_SWEEP",
        *("HPCJOBS_EVENT", "HPCJOBS_EXIT_CODE", "HPCJOBS_STATE", "HPCJOBS_TEXT"),  # for the command of --notify
    )
)
"""Variables that job.sh exports. Those that it keeps for itself begin with ``_hj_``."""
# bash gives these a special meaning or value, or forbids setting them.
_BASH = frozenset(
    (
        *("_", "BASHOPTS", "BASHPID", "BASH_ENV", "DIRSTACK", "EPOCHREALTIME", "EPOCHSECONDS", "EUID", "FUNCNAME"),
        *("GROUPS", "HISTCMD", "IFS", "LINENO", "OLDPWD", "OPTIND", "PIPESTATUS", "POSIXLY_CORRECT", "PPID", "PWD"),
        *("BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_CMDS", "BASH_COMMAND", "BASH_COMPAT", "BASH_LINENO"),
        *("BASH_REMATCH", "BASH_SOURCE", "BASH_SUBSHELL", "BASH_VERSINFO", "BASH_VERSION", "BASH_XTRACEFD"),
        *("EXECIGNORE", "FUNCNEST", "GLOBIGNORE", "OPTARG", "OPTERR", "TMOUT"),
        *("RANDOM", "REPLY", "SECONDS", "SHELLOPTS", "SHLVL", "SRANDOM", "UID"),
    )
)

# Slurm and MPI describe the job to each task: tasks with different values would not connect. SLURM_* that
# set srun's behaviour (SLURM_CPU_BIND, SLURM_HINT) are the user's.
_LAUNCHERS = re.compile(
    r"SLURMD_|SLURM_(JOB|STEP|ARRAY|TASK|NODE|NNODES|NTASKS|NPROCS|PROCID|LOCALID|GTIDS|CPUS_|MEM_PER|HET|SUBMIT"
    r"|RESTART_COUNT|CLUSTER_NAME|EXPORT_ENV|LAUNCH_NODE|SRUN_COMM|PRIO_PROCESS|UMASK)"
    r"|PMIX_(?!MCA_)|PMI_|OMPI_COMM_WORLD_|TORCHELASTIC_"
)


_NOT_IN_IMAGE = {
    "HOME": ("the container's runtime", "`home: true` of the site's containers section shows the real one"),
    "PATH": ("the image", "it would hide the container's runtime; set it in the program: bash -c 'PATH=... exec ...'"),
}
"""Variables that a program in an image cannot get from the job -> the setter, and the remedy."""


def check_env(env: Mapping[str, str], sources: Mapping[str, str], *, in_image: bool = False) -> None:
    """Refuse variables that would not reach the program unchanged.

    Raises RequestError: names the variable, its source and its setter.
    """
    for name in env:
        if owner := _owner(name):
            source = sources.get(f"env.{name}", "the site file")
            raise RequestError(f"env {name} ({source}): {owner} sets it", hint="give it another name")
        if in_image and name in _NOT_IN_IMAGE and f"env.{name}" in sources:
            setter, hint = _NOT_IN_IMAGE[name]
            raise RequestError(f"env {name} ({sources[f'env.{name}']}): in a container {setter} sets it", hint=hint)


def _owner(name: str) -> str | None:
    if name in _RANKS:
        return "each task's launch"
    if name in _OURS or name.startswith("_hj_"):
        return "job.sh"
    if _LAUNCHERS.match(name):
        return "Slurm, or the launcher of the tasks,"
    return "bash" if name in _BASH else None


def omp_threads(job: Job) -> int:
    """Threads that a task computes with: as many as it has CPUs."""
    return job.resources.cpus_per_task or 1


def export_lines(job: Job, *, launched_by: str) -> Iterator[str]:
    """The lines, in order; the job's own variables come last and win."""
    q = shlex.quote
    if job.kind.has_nodes:
        first = f"$({HOST_NAMES} | head -n 1)"
        nodes = "$SLURM_JOB_NUM_NODES"
        yield f"MASTER_ADDR={first}{q(job.address_suffix) if job.address_suffix else ''}"
    else:
        nodes = str(job.nodes)
        yield f"MASTER_ADDR={q(job.hosts[0]) if job.hosts else '127.0.0.1'}"
    yield "MASTER_PORT=$(free_port) # on this node, where rank 0 will run"
    yield f"export MASTER_ADDR MASTER_PORT HPCJOBS_NNODES={nodes} HPCJOBS_NTASKS_PER_NODE={job.ntasks_per_node}"
    yield "export HPCJOBS_NTASKS=$((HPCJOBS_NNODES * HPCJOBS_NTASKS_PER_NODE))"
    yield f"export HPCJOBS_LAUNCHED_BY={q(launched_by)} OMP_NUM_THREADS={omp_threads(job)}"
    if job.interface:
        name = q(job.interface)
        yield f"export HPCJOBS_IFNAME={name} GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    for variable, value in job.env.items():
        yield f"export {variable}={q(value)}"


def enter_options(inside: Inside, env: Iterable[str]) -> tuple[str, ...]:
    """The options for this image; ``env``: names of the job's own variables."""
    variables = list(env)
    return (
        f"--exit-code={int(ExitCode.CONTAINER)}",
        f"--name={inside.name}",
        f"--program={inside.program}",
        f"--prefix={inside.runtime.upper()}",
        f"--image={inside.image}",
        *((f"--fingerprint={inside.fingerprint}",) if inside.fingerprint else ()),
        *(("--staged",) if inside.stage else ()),
        *((f"--driver={inside.driver}",) if inside.driver else ()),
        *(f"--bind={bind.source}:{bind.target}:{bind.mode}" for bind in inside.binds),
        *((Raw(f"--scratch={inside.scratch}"),) if inside.scratch else ()),
        f"--package-path={inside.package_folder}",
        *(("--keep-python-path",) if "PYTHONPATH" in variables else ()),
        *(f"--env={name}" for name in variables),
        *(() if inside.home else ("--no-home",)),
        *(("--option=--cleanenv",) if inside.clean_env else ()),
        *((f"--option=--{inside.gpu}",) if inside.gpu else ()),
        *(f"--option={arg}" for arg in inside.args),
    )
