"""Launchers: each turns a job into the command line that starts its ranks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hpcjobs import slurm_commands
from hpcjobs.job.layout import srun_options
from hpcjobs.job.models import Job
from hpcjobs.processes.start import LEAVE_FOLDER, module_words, own_module_words
from hpcjobs.scheduler_kind import SchedulerKind


class Raw(str):
    """Shell text that enters a command line unquoted; every other token is quoted."""


class Launch(NamedTuple):
    """How the tasks start."""

    command: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Shell lines, run once by the script before the command."""


class Launcher(NamedTuple):
    """A launcher, and the kinds of schedulers it works under."""

    build: Callable[[Job], Launch]
    fits: Callable[[SchedulerKind], bool] = lambda kind: True


def entering(job: Job) -> tuple[str, ...]:
    """The words before a command that runs it in the job's image; with pyxis srun has entered it already."""
    return () if job.container is None or job.container.runtime == "pyxis" else (Raw('"${_hj_enter[@]}"'),)


def task(job: Job, *, label: bool = False, agents: bool = False) -> tuple[str, ...]:
    """The words before a program that run it as one rank, by ``rank.sh``.

    Args:
        label: the rank goes before each line of output; ``srun --label`` does it otherwise.
        agents: elastic agents start the ranks, and start them again.
    """
    options = ["--label"] if label else []
    if job.min_nodes is not None:
        options.append(f"--min-tasks={job.min_nodes * job.ntasks_per_node}")
    if agents and job.retries is not None:
        options.append(f"--max-errors={job.retries.error}")
    inside = job.container
    if inside is not None and inside.runtime == "pyxis":  # elsewhere enter.sh does it
        options.append(f"--python-path={inside.package_folder}")
    return ("bash", Raw('"$_hj_shell/rank.sh"'), *options, "--")


def command_line(tokens: Sequence[str]) -> str:
    """``tokens`` as one line of shell: the single place where words are quoted."""
    return " ".join(token if isinstance(token, Raw) else shlex.quote(token) for token in tokens)


def srun_args(job: Job, *, tasks_per_node: int, cpus_per_task: int | None) -> tuple[str, ...]:
    """Options of the ``srun`` that fills the allocation.

    Repeated although the allocation knows them: Slurm 22.05 to 23.02 does not pass
    ``--cpus-per-task`` on, and a task count left to the environment would win over the layout.
    """
    tokens: list[str] = [
        *((Raw('--nodelist="$SLURM_JOB_NODELIST"'),) if job.spare else ()),
        Raw('--nodes="$SLURM_JOB_NUM_NODES"'),
        Raw(f'--ntasks="$((SLURM_JOB_NUM_NODES * {tasks_per_node}))"'),
        f"--ntasks-per-node={tasks_per_node}",
    ]
    if cpus_per_task is not None:
        tokens.append(f"--cpus-per-task={cpus_per_task}")
    if (gpus := gpus_of_node(job)) is not None and tasks_per_node == job.ntasks_per_node:
        # Without the model: Slurm 22.05 shows the tasks no GPU at all where a model is given.
        tokens.append(f"--gpus-per-task={gpus // tasks_per_node}")
    if job.mpi is not None:
        tokens.append(f"--mpi={job.mpi}")
    tokens += srun_options(job.affinity)
    tokens += ["--no-kill", "--kill-on-bad-exit=0"] if job.min_nodes else ["--kill-on-bad-exit=1"]
    return (*tokens, *pyxis_args(job), *(f"--{option.removeprefix('--')}" for option in job.srun))


def gpus_of_node(job: Job) -> int | None:
    """A node's GPUs, where the site asks for them by the task; None: it does not, or the job has none.

    A step inherits the per-task options of its job. The one task that torchrun and mpirun start on each node would
    have the GPUs of one rank, so the script asks for all of them (SLURM_GPUS_PER_NODE).
    """
    return (job.gpus_per_node or None) if job.gpu_request == "gpus-per-task" else None


def one_task_per_rank(job: Job) -> tuple[str, ...]:
    """The whole command: ``srun``, ``rank.sh``, the program."""
    args = srun_args(job, tasks_per_node=job.ntasks_per_node, cpus_per_task=job.resources.cpus_per_task or None)
    label = ("--label",) if job.ntasks > 1 else ()
    return tuple(slurm_commands.start_step([*args, *label], [*task(job), *entering(job), *job.argv]))


_FORWARDED = ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def pyxis_args(job: Job) -> tuple[str, ...]:
    """Options that NVIDIA's plugin gives srun: the tasks, wrapper and all, start inside the image."""
    inside = job.container
    if inside is None or inside.runtime != "pyxis":
        return ()
    mounts = [f"{bind.source}:{bind.target}" + (":ro" if bind.mode == "ro" else "") for bind in inside.binds]
    return (
        f"--container-image={inside.image}",
        f"--container-mounts={','.join(mounts)}",
        Raw('--container-workdir="$PWD"'),
        f"--container-env={','.join((*_FORWARDED, *job.env))}",  # before values of the image
        "--container-mount-home" if inside.home else "--no-container-mount-home",
        *inside.args,
    )


def _fences(job: Job) -> tuple[str, ...]:
    name, value = slurm_commands.FENCES
    return (f"export {name}=${{{name}:-{value}}}",) if (job.max_nodes or job.nodes) > 1 else ()


def srun(job: Job) -> Launch:
    """One task per rank, started by Slurm, which tells Open MPI by PMIx who the others are."""
    with_pmix = (job.mpi or "").startswith("pmix")
    return Launch(command=one_task_per_rank(job), before=(*open_mpi_network(job), *_fences(job)) if with_pmix else ())


def batch(job: Job) -> Launch:
    """Run a batch script, which starts its tasks itself, once on the first node.

    Its interpreter reads it: scratch, where the run folder is, may be mounted so that no file there can be executed.
    """
    return Launch(command=(*_interpreter(job.batch_script or b""), Raw('"$_hj_script"'), *job.argv[1:]))


def _interpreter(script: bytes) -> tuple[str, ...]:
    """Interpreter and the one argument of a ``#!`` line, as Linux reads it."""
    line = script.partition(b"\n")[0].removeprefix(b"#!").strip(b" \t")
    path, *argument = line.decode("utf-8", "surrogateescape").replace("\t", " ").split(" ", 1)
    return tuple(text.strip() for text in (path, *argument)) if path else ()


MOST_RESTARTS = 1000
QUIET = 'export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"'
"""The agent of the first node keeps the store and may leave first: torch's C++ then warns each other agent, which is
ending too, by a trace of the lost connection. Errors are still printed."""

STORE_OF_RANK_0 = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Each start of the ranks has a separate store, which rank 0 keeps. The agents' store belongs to the first start:
restarts for a node that joined or left are not counted, ranks would meet their predecessors' entries there, and it is
lost with the node of the first rank 0."""


def torchrun(job: Job) -> Launch:
    """One elastic agent per node, which starts the node's ranks; again within the allocation, with retries.

    The agent needs torch: in a container it runs inside, and ``rank.sh`` with it.
    """
    least = f"{job.min_nodes}:" if job.min_nodes else ""
    agent = (
        *("bash", Raw('"$_hj_shell/agent.sh"')),
        *((f"--address-suffix={job.address_suffix}",) if job.kind.has_nodes and job.address_suffix else ()),
        *((f"--numa-binding={numa}",) if (numa := job.affinity.numa_binding or "none") != "none" else ()),
        *entering(job),
        *(job.python, *module_words("torch.distributed.run")),
        Raw(f'--nnodes="{least}$HPCJOBS_NNODES"'),
        f"--nproc-per-node={job.ntasks_per_node}",
        "--rdzv-backend=c10d",
        Raw('--rdzv-id="$HPCJOBS_JOB_ID"'),
        Raw('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'),
        *((f"--max-restarts={min(job.retries.node, MOST_RESTARTS)}",) if job.retries else ()),
        "--no-python",
    )
    before = (QUIET, STORE_OF_RANK_0) if job.retries else (QUIET,)
    start = (*agent, *task(job, label=job.ntasks > 1, agents=True), *job.argv)
    if not job.kind.runs_steps:
        return Launch(command=start, before=before)
    cpus = (job.resources.cpus_per_task or 1) * job.ntasks_per_node
    args = srun_args(job, tasks_per_node=1, cpus_per_task=cpus)
    return Launch(command=tuple(slurm_commands.start_step(args, start)), before=before)


def children(job: Job) -> tuple[str, ...]:
    """The whole command: one process that starts the tasks and ends them together."""
    tokens = (sys.executable, *own_module_words("hpcjobs.runtime.spawn"), f"--ntasks={job.ntasks_per_node}", "--")
    return (*tokens, *task(job, label=job.ntasks > 1), *entering(job), *job.argv)


def spawn(job: Job) -> Launch:
    """The tasks as children of one process on this machine, ended together."""
    return Launch(command=children(job))


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
    # mpirun starts its daemons with srun. From Slurm 23.11 on srun would read these variables, and give all ranks of a
    # further node the cores and GPUs of one task.
    whole_nodes = ("unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK",) if job.kind.runs_steps else ()
    return Launch(
        command=(*tokens, *task(job, label=job.ntasks > 1), *entering(job), *job.argv),
        before=(*_BEFORE, *whole_nodes, *open_mpi_network(job), *_forward(job)),
    )


def _hosts(job: Job) -> tuple[str, ...]:
    """Return slots by host, if no scheduler passes them to mpirun."""
    if job.kind.has_nodes:
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
    if job.interface is None or (job.nodes == 1 and not job.kind.has_nodes):
        return ()
    return (f"export OMPI_MCA_btl_tcp_if_include={job.interface}",)


_SERVER = f"""\
{LEAVE_FOLDER}
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
hosts = parse_hosts(sys.argv[1])
server = RendezvousHTTPServer(("", 0), RendezvousHandler, False)
server.init(get_host_assignments(hosts, sum(host.slots for host in hosts)))
print(server.server_port, flush=True)
server.serve_forever()"""


def horovod_gloo(job: Job) -> Launch:
    """Plain ``srun`` (or, on one machine, ``spawn``): the script keeps the addresses until all ranks have them."""
    command = one_task_per_rank(job) if job.kind.runs_steps else children(job)
    return Launch(command=command, before=_rendezvous(job))


def _rendezvous(job: Job) -> tuple[str, ...]:
    """Start Horovod's own server, which says its port once it listens, and publish where it is."""
    per_node = job.ntasks_per_node
    names = slurm_commands.HOST_NAMES if job.kind.has_nodes else "echo localhost"
    interface = f" HOROVOD_GLOO_IFACE={shlex.quote(job.interface)}" if job.interface else ""
    # The node of this script may be outside the job's own nodes if there were spare ones.
    here = f"$SLURMD_NODENAME{job.address_suffix}" if job.spare else "$MASTER_ADDR"
    server = (*entering(job), job.python, "-", Raw('"$_hj_hosts"'))
    return (
        "# Horovod's ranks find each other through this server: neither MPI nor ssh is needed.",
        f"_hj_hosts=$({names} | sed 's/$/:{per_node}/' | paste -sd,)",
        f"""exec {{_hj_port}}< <(exec {command_line(server)} <<'PY'""",
        *_SERVER.splitlines(),
        "PY",
        ")",
        '_hj_helpers+=("$!")',
        'read -r -u "$_hj_port" HOROVOD_GLOO_RENDEZVOUS_PORT ||',
        f"    die {shlex.quote(f'no Horovod rendezvous: is Horovod in the environment of {job.python}?')}",
        f"export HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_GLOO_RENDEZVOUS_ADDR={here}",
        f"export HOROVOD_CONTROLLER=gloo HOROVOD_CPU_OPERATIONS=gloo{interface}",
        f"export HOROVOD_SIZE=$HPCJOBS_NTASKS HOROVOD_LOCAL_SIZE={per_node} HOROVOD_CROSS_SIZE=$HPCJOBS_NNODES",
    )


def horovodrun(job: Job) -> Launch:
    """Horovod's own launcher: on this machine directly, on other nodes by ssh.

    Of one node it wants the loopback interface, and finds none where another one is named.
    """
    interface = ("--network-interfaces", job.interface) if job.interface and job.nodes > 1 else ()
    hosts: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    if job.kind.has_nodes:
        suffix = f"sed 's/$/:{job.ntasks_per_node}/' | paste -sd,"
        before = (f"_hj_hosts=$({slurm_commands.HOST_NAMES} | {suffix})",)
        hosts = ("-H", Raw('"$_hj_hosts"'))
    elif job.hosts:
        hosts = ("-H", ",".join(f"{host}:{job.ntasks_per_node}" for host in job.hosts))
    launcher = (job.python, *module_words("horovod.runner.launch"))
    tokens = (*launcher, "--gloo", "-np", Raw('"$HPCJOBS_NTASKS"'), *hosts, *interface)
    label = r"\1: " if job.ntasks > 1 else ""
    plain = rf'exec "$@" > >(exec sed -u -E "s/^\[([0-9]+)\]<std(out|err)>:/{label}/") 2>&1'
    return Launch(command=("bash", "-c", plain, "horovodrun", *tokens, *task(job), *job.argv), before=before)


__all__ = [
    "LAUNCHERS",
    "Launch",
    "Launcher",
    "Raw",
    "command_line",
    "entering",
    "gpus_of_node",
    "launch",
    "launched_by",
    "srun_args",
    "task",
]

# The first of its scheduler's is the default of a site: launchers without requirements come first.
LAUNCHERS = {
    "srun": Launcher(srun, lambda kind: kind.runs_steps),
    "spawn": Launcher(spawn, lambda kind: not kind.has_nodes),
    "torchrun": Launcher(torchrun),
    "mpirun": Launcher(mpirun),
    "horovod-gloo": Launcher(horovod_gloo),
    "horovodrun": Launcher(horovodrun),
    "batch": Launcher(batch, lambda kind: kind.takes_sbatch_options),
}


def launch(job: Job) -> Launch:
    """How ``job``'s launcher starts its tasks."""
    return LAUNCHERS[job.launcher].build(job)


def launched_by(job: Job) -> str:
    """Describe the launcher for messages: the attempted command is half of the reason for a failure."""
    return f"srun --mpi={job.mpi}" if job.launcher == "srun" and job.mpi else job.launcher
