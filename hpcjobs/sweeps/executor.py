"""A submitit executor of a site: the same resolved job as every other route, as parameters of submitit.

Unlike ``job.sh``, its jobs have submitit's file names, signal (checkpointing) and line that starts the tasks. The tasks
start without our ``rank.sh``, so ranks come from srun or submitit.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit
from submitit.core.core import PicklingExecutor

from hpcjobs import guards
from hpcjobs.errors import RequestError
from hpcjobs.files import make_own_folder
from hpcjobs.guards import Amounts
from hpcjobs.job.launch import Raw, srun_args
from hpcjobs.job.models import Job
from hpcjobs.job.options import sbatch_options
from hpcjobs.job.plan import resolve_request
from hpcjobs.job.script import setup_text
from hpcjobs.run.budget import find_unknown, most_of
from hpcjobs.run.folder import make_root
from hpcjobs.site.models import Site

_OTHER_NAMES = {
    "tasks_per_node": "ntasks_per_node",
    "num_gpus": "gpus_per_node",
    "timeout_min": "time",
    "mem_gb": "mem",
}
NAMES = ("timeout_min", "mem_gb", "tasks_per_node", "array_parallelism", "additional_parameters")
"""Names of submitit that neither a job nor sbatch has."""


def rename(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` of a job, some by names of submitit: ``timeout_min``, ``mem_gb``, ``slurm_partition``.

    Numbers are converted: minutes to a time, gigabytes to a size. ``additional_parameters`` are options themselves.

    Raises RequestError: an option is named twice.
    """
    renamed: dict[str, Any] = {}
    additional = dict(options.get("slurm_additional_parameters") or options.get("additional_parameters") or {})
    given = {name: value for name, value in options.items() if name.removeprefix("slurm_") != "additional_parameters"}
    for name, value in [*given.items(), *additional.items()]:
        plain = name.removeprefix("slurm_")
        own = _OTHER_NAMES.get(plain, plain.replace("-", "_"))
        if own in renamed:
            raise RequestError(f"{name}: {own} has been given by another name too", hint="leave one of them out")
        renamed[own] = _convert(plain, value)
    return renamed


def _convert(name: str, value: Any) -> Any:
    if value is None or name not in ("time", "timeout_min", "mem_gb"):
        return value
    if name == "mem_gb":
        return f"{round(float(value) * 1024)}M"
    return f"{round(float(value) * 60)}s" if name == "timeout_min" else f"{value}m" if isinstance(value, int) else value


_SUBMITITS = frozenset(("array", "signal", "open_mode"))
"""Options that submitit sets itself."""
_NO_LIMIT_MIN = 365 * 24 * 60
_FREE_PORT = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"


class _Guarded(PicklingExecutor):
    """Submits within the limits of the environment (`hpcjobs.guards`)."""

    _job: Job
    _resolved: dict[str, Any]

    def guard(self, job: Job) -> None:
        """Count each submission as one of ``job``, which the current parameters belong to."""
        self._job, self._resolved = job, dict(self.parameters)

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[Any]:
        """As submitit's; a function with ``checkpoint`` may start again after each of ``max_num_timeout`` limits."""
        guards.refuse_change("submit")
        starts = sum(1 + self.max_num_timeout * hasattr(each.function, "checkpoint") for each in delayed_submissions)
        most = Amounts(*(starts * amount for amount in most_of(self._job, "submitit")))._replace(
            jobs=len(delayed_submissions)
        )
        if guards.budget_text() is not None and self.parameters != self._resolved:
            raise RequestError(
                "update_parameters was called, and what such jobs may use cannot be counted for the budget",
                hint="give the parameters to hpcjobs.executor",
            )
        with guards.count(self._job.name, most, find_unknown(self._job, "submitit")):
            return super()._internal_process_submissions(delayed_submissions)


class SlurmExecutor(_Guarded, submitit.SlurmExecutor):
    """submitit's, within the limits of the environment. It has submitit's name, which submitit reads."""


class LocalExecutor(_Guarded, submitit.LocalExecutor):
    """The same for this machine."""


def executor(
    *,
    site: str | Site | None = None,
    folder: str | Path | None = None,
    name: str = "submitit",
    max_num_timeout: int = 3,
    signal_delay_s: int = 90,
    array_parallelism: int = 256,
    **parameters_of_job: Any,
) -> submitit.Executor:
    """A `submitit.SlurmExecutor` for a Slurm site, a `submitit.LocalExecutor` for a local one.

    ``site`` and the parameters of the job are as for `hpcjobs.plan`, or have submitit's names (``timeout_min``,
    ``mem_gb``, ``tasks_per_node``, ``slurm_partition``); the rest is submitit's. Submitit talks to the cluster that
    SLURM_CONF names: where the site names one, it is set for this process.

    Raises ConfigError: a file is wrong. RequestError: the job does not fit the site, or this process talks to another
    cluster already. At a submission: HPCJOBS_READ_ONLY or HPCJOBS_BUDGET refuses it.
    """
    options = rename(parameters_of_job)
    max_num_timeout = options.pop("max_num_timeout", max_num_timeout)
    signal_delay_s = options.pop("signal_delay_s", signal_delay_s)
    array_parallelism = options.pop("array_parallelism", array_parallelism)
    if options.setdefault("container", "none") != "none":
        raise RequestError("a function runs in the Python that pickled it, in no container", hint="submit a script")
    # Submitit writes its own #SBATCH lines, so no script is rendered.
    job = resolve_request(("true",), site, **({"name": name} | options | {"retries": "off"}))
    where = Path(folder).absolute() if folder is not None else Path(job.run_root) / f"{name}-submitit"
    make_root(where.parent)
    make_own_folder(where)
    if not job.kind.takes_sbatch_options:
        return _local(job, where, max_num_timeout=max_num_timeout, signal_delay_s=signal_delay_s)
    _point_at(job)
    submitit_executor = SlurmExecutor(where, max_num_timeout=max_num_timeout, python=shlex.quote(job.python))
    submitit_executor.update_parameters(
        **parameters(job, where), signal_delay_s=signal_delay_s, array_parallelism=array_parallelism
    )
    submitit_executor.guard(job)
    return submitit_executor


def parameters(job: Job, folder: Path) -> dict[str, Any]:
    """A resolved job as parameters of `submitit.SlurmExecutor`.

    Every directive goes the way around submitit's own names, so that the site's spelling of it is kept.
    """
    if job.max_nodes is not None:
        raise RequestError(f"nodes={job.resources.nodes}: submitit takes a number of nodes, not a range")
    options = {key.replace("-", "_"): True if value is None else value for key, value in sbatch_options(job)}
    values: dict[str, Any] = {
        "job_name": job.name,
        "nodes": job.nodes,
        "ntasks_per_node": job.ntasks_per_node,
        "wckey": None,
        "additional_parameters": {key: value for key, value in options.items() if key not in _SUBMITITS},
        "setup": _setup(job, folder),
        "srun_args": _srun(job),
    }
    limit_s = job.time_limit_s
    if limit_s is not None:
        values["time"] = -(-limit_s // 60)
    elif job.resources.time:
        values["additional_parameters"]["time"] = job.resources.time
    return values


def _setup(job: Job, folder: Path) -> list[str]:
    text = setup_text(job, folder, launched_by="submitit")
    own = [
        f"export HPCJOBS_SCHEDULER={job.scheduler} HPCJOBS_JOB_ID=${job.kind.id_variable}",
        f"export HPCJOBS_RUN_DIR={shlex.quote(str(folder))}/run-$SLURM_JOB_ID",
        'mkdir -p -- "$HPCJOBS_RUN_DIR"',
    ]
    return [*own, *text.strip("\n").splitlines()]


def _srun(job: Job) -> list[str]:
    """The arguments of the Jinja route's srun, with the numbers that its shell would put in."""
    args = srun_args(job, tasks_per_node=job.ntasks_per_node, cpus_per_task=job.resources.cpus_per_task or None)
    plain = [arg for arg in args if not isinstance(arg, Raw) and not arg.startswith("--ntasks-per-node=")]
    return [f"--nodes={job.nodes}", f"--ntasks={job.ntasks}", f"--ntasks-per-node={job.ntasks_per_node}", *plain]


def _point_at(job: Job) -> None:
    now = os.environ.get("SLURM_CONF")
    if job.slurm_conf is None or now == job.slurm_conf:
        return
    if now:
        raise RequestError(
            f"this process talks to the cluster of SLURM_CONF={now}, and site {job.site} to that of {job.slurm_conf}",
            hint="submitit knows one cluster per process",
        )
    os.environ["SLURM_CONF"] = job.slurm_conf


def _local(job: Job, folder: Path, *, max_num_timeout: int, signal_delay_s: int) -> submitit.LocalExecutor:
    ranks = {"RANK": "GLOBALID", "LOCAL_RANK": "LOCALID", "HPCJOBS_JOB_ID": "JOB_ID"}
    exports = [f"export {name}=$SUBMITIT_LOCAL_{source};" for name, source in ranks.items()]
    own_folder = (
        f'export HPCJOBS_RUN_DIR={shlex.quote(str(folder))}/run-$SUBMITIT_LOCAL_JOB_ID; mkdir -p "$HPCJOBS_RUN_DIR";'
    )
    wrapper = shlex.join(["sh", "-c", " ".join([*exports, own_folder, 'exec "$@"']), "sh", job.python])
    limit_s = job.time_limit_s
    submitit_executor = LocalExecutor(folder, max_num_timeout=max_num_timeout, python=wrapper)
    submitit_executor.update_parameters(
        timeout_min=_NO_LIMIT_MIN if limit_s is None else limit_s / 60,
        nodes=1,
        tasks_per_node=job.ntasks_per_node,
        gpus_per_node=job.gpus_per_node,
        signal_delay_s=signal_delay_s,
        setup=_local_setup(job),
    )
    submitit_executor.guard(job)
    return submitit_executor


def _local_setup(job: Job) -> list[str]:
    """Commands that submitit joins by ``&&`` and runs before its command."""
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(job.ntasks),
        "LOCAL_WORLD_SIZE": str(job.ntasks),
        "NODE_RANK": "0",
        "HPCJOBS_NNODES": "1",
        "HPCJOBS_NTASKS": str(job.ntasks),
        "HPCJOBS_LAUNCHED_BY": "submitit",
        "OMP_NUM_THREADS": str(job.resources.cpus_per_task or 1),
    }
    if job.interface:
        world |= dict.fromkeys(("HPCJOBS_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), job.interface)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (world | job.env).items()]
    port = f"MASTER_PORT=$({shlex.join([job.python, '-c', _FREE_PORT])}) && export MASTER_PORT"
    die = """die() { echo "hpcjobs: $(hostname): $*" >&2; exit 1; }"""
    prologue = ["{\n" + "\n".join(job.prologue) + "\n}"] if job.prologue else []
    return [die, *prologue, *exports, port, f"cd -- {shlex.quote(job.chdir)}"]
