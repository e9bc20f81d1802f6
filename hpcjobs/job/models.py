"""What is asked for (`JobSpec`), what it settles to (`Job`), and what will be sent (`Plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from hpcjobs.site.checks import check_duration
from hpcjobs.site.containers import Runtime
from hpcjobs.site.models import Frozen, GpuRequest, MemoryRequest, Resources, check_name
from hpcjobs.site.retries import Retries, parse_retries
from hpcjobs.units import time_limit_s


class Flag:
    """The command line's option for a field of `JobSpec`: ``--`` and the field's name, a short form, a line of help."""

    def __init__(self, help: str, *, short: str | None = None, also: str | None = None) -> None:
        self.help = help
        self.others = tuple(filter(None, (also, short)))


class JobSpec(Frozen, frozen=True):
    """The request for a job, from flags, a spec file or Python: everything optional, nothing added.

    Each option of a job is declared here alone: its name, its type, and its line of help, which every verb that submits
    jobs prints (`hpcjobs.cli.job_options`).
    """

    program: tuple[str, ...] = ()
    """A bundled trainer, a dotted module, a ``.py`` file or any executable; then its arguments."""
    resources: Resources = Resources()
    name: Annotated[str | None, Flag("Job name.", short="-J", also="--job-name")] = None
    launcher: Annotated[str | None, Flag("srun, torchrun, mpirun, spawn …")] = None
    env: Annotated[dict[str, str], Flag("NAME=VALUE, or NAME to pass on.")] = {}
    template: Annotated[str | None, Flag("Template of the job script, by name.")] = None
    chdir: Annotated[str | None, Flag("Folder the tasks start in.", short="-D")] = None
    retries: Annotated[str | None, Flag("Start again after: timeout=∞,preempt=∞,node=3,error=0; on; off.")] = None
    signal_before: Annotated[str | None, Flag("Signal the program this long before its time limit.")] = None
    preflight: Annotated[bool | None, Flag("Check the nodes first; end the job and name the node if one is bad.")] = (
        None
    )
    spare: Annotated[int | None, Flag("Extra nodes to request; the best ones are used.")] = None
    min_nodes: Annotated[
        int | None, Flag("Continue with at least this many nodes when others fail (torchrun, --retries).")
    ] = None
    container: Annotated[str | None, Flag("Run it in this image: a name of the site's, or a file; none.")] = None
    stage_image: Annotated[bool | None, Flag("Copy the image to each node first.")] = None
    snapshot: Annotated[bool | None, Flag("Copy the code and run the copy.")] = None
    sbatch: Annotated[tuple[str, ...], Flag("NAME=VALUE, or NAME: passed to sbatch unread.")] = ()
    wrap: Annotated[str | None, Flag("Shell text, run as a batch script in place of PROGRAM.")] = None
    srun: Annotated[tuple[str, ...], Flag("NAME=VALUE, or NAME: passed to the tasks' srun unread.")] = ()

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, "job name")
        if self.retries is not None:
            parse_retries(self.retries)
        if self.signal_before is not None:
            check_duration(self.signal_before, "signal_before")
        for field in ("spare", "min_nodes"):
            if (count := getattr(self, field)) is not None and count < 1:
                raise ValueError(f"{field} must be positive, not {count}")
        for name, value in self.env.items():
            if not name.isidentifier() or not name.isascii():
                raise ValueError(f"env {name!r} is no name of an environment variable")
            if "\0" in value:
                raise ValueError(f"env {name}: a value cannot hold a NUL byte")
        if any("\0" in word for word in self.program):
            raise ValueError("program: an argument cannot hold a NUL byte")
        for word in (*self.program, *self.env.values(), self.chdir or ""):
            if any("\ud800" <= char <= "\udfff" for char in word):
                raise ValueError(f"{word!r} is not UTF-8 text")


class Layer(NamedTuple):
    """A spec and where it was read (``job.yaml``, ``flag``); later layers win."""

    source: str
    spec: JobSpec
    sources: Mapping[str, str] = {}
    """Where single fields were read, if not at ``source``."""
    batch_script: bytes | None = None
    """The batch script whose options these are."""


class Bind(NamedTuple):
    """A folder of the node and where an image sees it; ``mode`` is ``rw`` or ``ro``."""

    source: str
    target: str
    mode: str


class Inside(Frozen, frozen=True):
    """The image that a job's program runs in, settled."""

    runtime: Runtime
    program: str
    name: str
    image: str
    """Absolute; with pyxis perhaps no file but what enroot fetches."""
    fingerprint: str | None
    """Of the image when it was submitted; None: it has none."""
    binds: tuple[Bind, ...]
    gpu: str | None
    """The runtime's option for GPUs, without its dashes."""
    clean_env: bool
    home: bool
    args: tuple[str, ...]
    stage: str | None
    """Folder of each node's own copy; None: nobody copies."""
    scratch: str | None
    """The site's scratch as a word of shell, for the node to expand."""
    driver: str | None
    """The oldest NVIDIA driver that will do."""
    package_folder: str
    """Where Python finds this package in the image."""


class Job(Frozen, frozen=True):
    """A job with everything settled and within the site's limits. Nothing downstream reads site or spec."""

    name: str
    site: str
    site_file: str
    rehearsal: bool
    scheduler: Literal["slurm", "local"]
    slurm_conf: str | None
    argv: tuple[str, ...]
    """The program as each task runs it."""
    chdir: str
    """Absolute folder the tasks start in."""
    snapshot: bool
    template: str
    launcher: str
    python: str
    resources: Resources
    """Every field said or null; ``gpus_per_node`` is a number, its model in ``gpu_model``."""
    nodes: int
    """The fewest, where a range was asked for."""
    max_nodes: int | None
    """The most nodes of a range; None: ``nodes`` is the number."""
    ntasks_per_node: int
    sources: dict[str, str]
    """For every settled value: where it was read."""
    gpu_model: str | None
    """The model that was asked for, or that all GPUs of the partition are."""
    gpu_request: GpuRequest
    memory_request: MemoryRequest
    directives: dict[str, str | None]
    sbatch: tuple[str, ...]
    """Options of sbatch that are passed through unread: ``name=value`` or ``name``."""
    srun: tuple[str, ...]
    """Options of the tasks' srun that are passed through unread."""
    hosts: tuple[str, ...]
    """On a local site, the hosts that mpirun or horovodrun reach by ssh (``nodelist``); empty: this machine."""
    mpi: str | None
    interface: str | None
    address_suffix: str
    prologue: tuple[str, ...]
    """Shell lines before the launch: modules, conda or venv, the site's own."""
    env: dict[str, str]
    run_root: str
    """Absolute folder in which the run folder is made."""
    retries: Retries | None
    """None: whatever ends it ends it for good."""
    node_python: str
    """The Python that decides about further attempts, on the job's first node."""
    signal_before_s: int | None
    """Seconds ahead of the time limit at which the program is told; None: from what it measures."""
    left_out: dict[str, str]
    """Nodes excluded because a check found them bad, each with the reason."""
    preflight: tuple[str, ...]
    """The command that looks at the nodes first; empty: nobody does."""
    spare: int
    """Nodes asked for beyond ``nodes``; the preflight chooses."""
    min_nodes: int | None
    """The fewest nodes that are a world; None: all of them."""
    container: Inside | None
    """None: the program runs on the node as it is."""
    layers: tuple[Layer, ...] = ()
    """What was requested, layer by layer, so that it can be requested again with changes."""

    @property
    def batch_script(self) -> bytes | None:
        """A script that starts its own tasks: it is run once, on the first node."""
        return next((layer.batch_script for layer in self.layers if layer.batch_script is not None), None)

    def asked(self, field: str) -> str:
        """An option for messages: its value, and where that was said."""
        return f"{field}={getattr(self.resources, field)} ({self.sources.get(field, 'default')})"

    @property
    def ntasks(self) -> int:
        """Tasks over all nodes: the world size; of a range of nodes the largest."""
        return (self.max_nodes or self.nodes) * self.ntasks_per_node

    @property
    def time_limit_s(self) -> int | None:
        """Seconds it may run; None: no limit was asked for, or none at all."""
        limit = self.resources.time
        return time_limit_s(limit) if isinstance(limit, str) else None

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node; 0: none was asked for."""
        gpus = self.resources.gpus_per_node
        return gpus if isinstance(gpus, int) else 0


class Plan(NamedTuple):
    """Exactly what a submission will write and run; a dry run prints it."""

    job: Job
    script: str
    """Text of ``job.sh``."""
    run_dir: Path
    command: tuple[str, ...]
    """What hands the script to the scheduler."""
    made_by: str
    """The command line that asked for it."""
