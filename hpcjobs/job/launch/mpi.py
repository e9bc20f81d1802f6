"""Tasks started by Open MPI's mpirun: inside an allocation, on this machine, or over a list of hosts."""

from __future__ import annotations

from hpcjobs.job.launch.base import TASK, Launch, Raw, entering
from hpcjobs.job.models import Job

OURS = (
    *("MASTER_ADDR", "MASTER_PORT", "HPCJOBS_NNODES", "HPCJOBS_NTASKS", "HPCJOBS_JOB_ID", "HPCJOBS_RUN_DIR"),
    *("HPCJOBS_CONTROL_DIR", "HPCJOBS_DEADLINE", "HPCJOBS_IMAGE"),
    *("HPCJOBS_LAUNCHED_BY", "HPCJOBS_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
)
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
    'if [ "$UID" -eq 0 ]; then # Open MPI 4 and 5 want this said twice',
    "    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "fi",
)


def mpirun(job: Job) -> Launch:
    """As many ranks on each node as were asked for, with the software and the variables of the job.

    Ranks are not bound to cores: on a shared node Open MPI would bind every job to the same ones.
    """
    tokens = [
        *("mpirun", "-np", Raw('"$HPCJOBS_NTASKS"')),
        *("--map-by", f"ppr:{job.ntasks_per_node}:node", "--bind-to", "none"),
        *_hosts(job),
        Raw('"${forward[@]}"'),
    ]
    return Launch(
        command=(*tokens, *TASK, *entering(job), *job.argv),
        before=(*_BEFORE, *open_mpi_network(job), *_forward(job)),
        ranks=(
            "export RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK",
            "export WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE",
            "export NODE_RANK=$((RANK / LOCAL_WORLD_SIZE))",
            *yielding(job),
        ),
        label=job.ntasks > 1,
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
        "forward=()",
        f"for forwarded in {' '.join(names)}; do",
        '    [ -z "${!forwarded+x}" ] || forward+=(-x "$forwarded")',
        "done",
    )


def open_mpi_network(job: Job) -> tuple[str, ...]:
    """Open MPI's TCP keeps to the fast network; a virtual bridge it would try otherwise can hang a job."""
    if job.interface is None or (job.nodes == 1 and job.scheduler == "local"):
        return ()
    return (f"export OMPI_MCA_btl_tcp_if_include={job.interface}",)


def yielding(job: Job) -> tuple[str, ...]:
    """Open MPI waits by spinning: with no CPU to spare, who is waited for would not run.

    Horovod's ranks compute on one thread and communicate on another, so a node full of ranks has none.
    """
    if job.ntasks_per_node == 1:
        return ()
    spare = '[ "$((LOCAL_WORLD_SIZE * OMP_NUM_THREADS))" -lt "$(getconf _NPROCESSORS_ONLN)" ]'
    return (f"{spare} || export OMPI_MCA_mpi_yield_when_idle=1",)
