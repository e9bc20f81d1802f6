"""Tasks started by Slurm itself."""

from __future__ import annotations

from hpcjobs.job.launch.base import Launch, Raw, entering, task
from hpcjobs.job.launch.mpi import open_mpi_network
from hpcjobs.job.layout import srun_options
from hpcjobs.job.models import Job
from hpcjobs.runtime.pmix import FENCES


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
    return ("srun", *args, *label, *task(job), *entering(job), *job.argv)


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
    name, value = FENCES
    return (f"export {name}=${{{name}:-{value}}}",) if (job.max_nodes or job.nodes) > 1 else ()


def srun(job: Job) -> Launch:
    """One task per rank, started by Slurm, which tells Open MPI by PMIx who the others are."""
    with_pmix = (job.mpi or "").startswith("pmix")
    return Launch(command=one_task_per_rank(job), before=(*open_mpi_network(job), *_fences(job)) if with_pmix else ())


def batch(job: Job) -> Launch:
    """A batch script, which starts its own tasks: it runs once, on the first node.

    Its interpreter reads it: scratch, where the run folder is, may be mounted so that no file there can be executed.
    """
    return Launch(command=(*_interpreter(job.batch_script or b""), Raw('"$_hj_script"'), *job.argv[1:]))


def _interpreter(script: bytes) -> tuple[str, ...]:
    """Interpreter and the one argument of a ``#!`` line, as Linux reads it."""
    line = script.partition(b"\n")[0].removeprefix(b"#!").strip(b" \t")
    path, *argument = line.decode("utf-8", "surrogateescape").replace("\t", " ").split(" ", 1)
    return tuple(text.strip() for text in (path, *argument)) if path else ()
