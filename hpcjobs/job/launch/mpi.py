"""Tasks started by Open MPI's mpirun: inside an allocation, on this machine, or over a list of hosts."""

from __future__ import annotations

from hpcjobs.job.launch.base import Launch, Raw, entering, task
from hpcjobs.job.models import Job

OURS = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
SOFTWARE = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""How modules, conda and venv reach the tasks."""
_BEFORE = (
    'case "$(mpirun --version 2>&1)" in',
    "    *'(Open MPI)'*) ;;",
    (
        "    *) die \"no mpirun of Open MPI in the job's PATH: name its module in the site file,"
        ' or install openmpi-bin (apt-get) or openmpi (dnf)" ;;'
    ),
    "esac",
    'if [ "$UID" -eq 0 ]; then # Open MPI 4 and 5 need both variables',
    "    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "fi",
)


def mpirun(job: Job) -> Launch:
    """As many ranks on each node as requested, with the software and the variables of the job.

    Where ranks are bound to cores, each has as many as its task.
    """
    bind_to = job.affinity.mpirun_bind_to or "none"
    cores = f":PE={job.resources.cpus_per_task or 1}" if bind_to == "core" else ""
    tokens = [
        *("mpirun", "-np", Raw('"$HPCJOBS_NTASKS"')),
        *("--map-by", f"ppr:{job.ntasks_per_node}:node{cores}", "--bind-to", bind_to),
        *_hosts(job),
        Raw('"${_hj_forward[@]}"'),
    ]
    # From Slurm 23.11 on the srun by which mpirun starts a daemon would read them, and give all ranks of a further node
    # the cores and GPUs of one task.
    whole_nodes = ("unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK",) if job.scheduler == "slurm" else ()
    return Launch(
        command=(*tokens, *task(job, label=job.ntasks > 1), *entering(job), *job.argv),
        before=(*_BEFORE, *whole_nodes, *open_mpi_network(job), *_forward(job)),
    )


def _hosts(job: Job) -> tuple[str, ...]:
    """Slots by host, where no scheduler tells mpirun what it has."""
    if job.scheduler == "slurm":
        return ()
    named = job.hosts or ("localhost",)
    return ("--host", ",".join(f"{host}:{job.ntasks_per_node}" for host in named))


def _forward(job: Job) -> tuple[str, ...]:
    names = dict.fromkeys((*SOFTWARE, *OURS, *job.env))
    return (
        "_hj_forward=()",
        f'for _hj_name in {" ".join(names)} "${{!HPCJOBS_@}}"; do',
        '    [ -z "${!_hj_name+x}" ] || _hj_forward+=(-x "$_hj_name")',
        "done",
    )


def open_mpi_network(job: Job) -> tuple[str, ...]:
    """Open MPI's TCP keeps to the fast network; a virtual bridge it would try otherwise can hang a job."""
    if job.interface is None or (job.nodes == 1 and job.scheduler == "local"):
        return ()
    return (f"export OMPI_MCA_btl_tcp_if_include={job.interface}",)
