"""Names of environment variables that job.sh or bash sets itself: a job cannot have them otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcjobs.errors import RequestError

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
# bash gives these a meaning or a value of its own, or does not let them be set.
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

# What Slurm and MPI tell each task about its job: tasks with other values would not meet. SLURM_* that
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
"""Variables that a program in an image cannot get from the job: what sets them, and what to do."""


def check_env(env: Mapping[str, str], sources: Mapping[str, str], *, in_image: bool = False) -> None:
    """Refuse names whose values would not reach the program unchanged.

    Raises:
        RequestError: names the variable, where it was read and what sets it.
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
