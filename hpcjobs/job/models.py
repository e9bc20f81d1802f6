"""The request (`JobSpec`), the resolved job (`Job`), and the submission (`Plan`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from hpcjobs.scheduler_kind import SchedulerKind, find_kind
from hpcjobs.site.checks import check_duration, check_job_name
from hpcjobs.site.figures import Figure, check_figures, check_metrics
from hpcjobs.site.models import (
    Affinity,
    AppliedPolicy,
    Frozen,
    GpuRequest,
    MemoryRequest,
    Resources,
    Retries,
    Runtime,
    SchedulerName,
    parse_retries,
)


class Flag:
    """The command line's option for a field of `JobSpec`: ``--`` and the field's name, a short form, a line of help."""

    def __init__(self, help: str, *, short: str | None = None, also: str | None = None) -> None:
        self.help = help
        self.others = tuple(filter(None, (also, short)))


class JobSpec(Frozen, frozen=True):
    """The request for a job, from flags, a spec file or Python. All fields are optional; no defaults are filled in.

    Each option of a job is declared here alone: its name, its type, and its line of help, which every verb that submits
    jobs prints (`hpcjobs.cli.options`).
    """

    program: tuple[str, ...] = ()
    """A bundled trainer, a dotted module, a ``.py`` file or any executable; then its arguments."""
    resources: Resources = Resources()
    name: Annotated[str | None, Flag("Job name [the program's name].", short="-J", also="--job-name")] = None
    launcher: Annotated[
        str | None, Flag("Program that starts the ranks: srun, torchrun, mpirun … [the site's first].")
    ] = None
    env: Annotated[
        dict[str, str], Flag("Environment variable of the job: NAME=VALUE, or NAME for its current value.")
    ] = {}
    template: Annotated[str | None, Flag("Template of the job script, by name.")] = None
    chdir: Annotated[str | None, Flag("Folder the tasks start in [current folder].", short="-D")] = None
    retries: Annotated[
        str | None,
        Flag("Restarts allowed for each cause: on (timeout=∞,preempt=∞,node=3,error=0), node=10, off [the site's]."),
    ] = None
    signal_before: Annotated[str | None, Flag("Signal the program this long before its time limit: 10m.")] = None
    preflight: Annotated[bool | None, Flag("Check the nodes first; end the job and name the node if one is bad.")] = (
        None
    )
    spare: Annotated[int | None, Flag("Nodes to request beyond --nodes; the best ones are used [0].")] = None
    min_nodes: Annotated[
        int | None, Flag("Continue with at least this many nodes when others fail (torchrun, --retries).")
    ] = None
    container: Annotated[
        str | None, Flag("Image to run in: a name in the site file, a file, or none [the site's].")
    ] = None
    stage_image: Annotated[bool | None, Flag("Copy the image to each node first.")] = None
    snapshot: Annotated[bool | None, Flag("Copy the code and run the copy.")] = None
    sbatch: Annotated[tuple[str, ...], Flag("Another option of sbatch, passed on unchecked: NAME=VALUE or NAME.")] = ()
    wrap: Annotated[str | None, Flag("Shell command to run as a batch script instead of PROGRAM.")] = None
    srun: Annotated[tuple[str, ...], Flag("Another option of the srun that starts the tasks: NAME=VALUE or NAME.")] = ()
    notify: Annotated[tuple[str, ...], Flag("Report the end by mail, mail:ADDRESS, command:TEXT or webhook:FILE.")] = ()
    notify_on: Annotated[str | None, Flag("Events that --notify reports: end,fail,requeue [all three].")] = None
    monitor: Annotated[
        bool | None, Flag("Sample the load of each node beside the program, as hpcjobs monitor does.")
    ] = None
    metric: Annotated[
        tuple[str, ...],
        Flag("Figure of merit in the log: 'tokens/s (\\S+)', json:PATH, or a preset such as lammps; may be repeated."),
    ] = ()
    figures: dict[str, Figure | str | None] = {}
    """Figures of merit by name, as ``--metric`` reads them; the first one is the figure of the run."""
    no_check: Annotated[bool | None, Flag("Do not check the program and the trainer's flags before submission.")] = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_job_name(self.name)
        if self.retries is not None:
            parse_retries(self.retries)
        if self.signal_before is not None:
            check_duration(self.signal_before, "signal_before")
        for field in ("spare", "min_nodes"):
            if (count := getattr(self, field)) is not None and count < 1:
                raise ValueError(f"{field} must be 1 or more, not {count}")
        check_figures(self.figures)
        check_metrics(self.metric)
        for name, value in self.env.items():
            if not name.isidentifier() or not name.isascii():
                raise ValueError(f"env {name!r} is no name of an environment variable")
            if "\0" in value:
                raise ValueError(f"env {name}: a value cannot hold a NUL byte")
        if any("\0" in arg for arg in self.program):
            raise ValueError("program: an argument cannot hold a NUL byte")
        for text in (*self.program, *self.env.values(), self.chdir or ""):
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError(f"{text!r} is not UTF-8 text")


class Layer(NamedTuple):
    """A spec and where it was read (``job.yaml``, ``flag``); later layers win."""

    source: str
    spec: JobSpec
    sources: Mapping[str, str] = {}
    """Sources of single fields, if not ``source``."""
    batch_script: bytes | None = None
    """The batch script of these options."""


class Bind(NamedTuple):
    """A folder of the node and where an image sees it; ``mode`` is ``rw`` or ``ro``."""

    source: str
    target: str
    mode: str


class Inside(Frozen, frozen=True):
    """The image that a job's program runs in, with all paths absolute."""

    runtime: Runtime
    program: str
    name: str
    image: str
    """Absolute; with pyxis it may be a name that enroot fetches."""
    fingerprint: str | None
    """The image's at submission; None: it has no fingerprint."""
    binds: tuple[Bind, ...]
    gpu: str | None
    """The runtime's option for GPUs, without its dashes."""
    clean_env: bool
    home: bool
    args: tuple[str, ...]
    stage: str | None
    """Folder of each node's own copy; None: it is not copied."""
    scratch: str | None
    """The site's scratch as a word of shell, for the node to expand."""
    driver: str | None
    """The oldest NVIDIA driver that will do."""
    package_folder: str
    """Path of this package in the image."""


class Job(Frozen, frozen=True):
    """A job with everything resolved and within the site's limits. Nothing downstream reads site or spec."""

    name: str
    site: str
    site_file: str
    rehearsal: bool
    scheduler: SchedulerName
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
    """Every field has a value or null; ``gpus_per_node`` is a number, its model in ``gpu_model``."""
    time_limit_s: int | None
    """Seconds it may run; None: no limit."""
    nodes: int
    """The fewest, where a range was requested."""
    max_nodes: int | None
    """The most nodes of a range; None: ``nodes`` is the number."""
    ntasks_per_node: int
    sources: dict[str, str]
    """For every resolved value: where it was read."""
    gpu_model: str | None
    """The requested model, or the one model that all GPUs of the partition have."""
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
    affinity: Affinity
    """Bindings of the ranks to cores and GPUs."""
    interface: str | None
    address_suffix: str
    prologue: tuple[str, ...]
    """Shell lines before the launch: modules, conda or venv, the site's own."""
    env: dict[str, str]
    run_root: str
    """Absolute parent of the run folder."""
    retries: Retries | None
    """None: whatever ends it ends it for good."""
    node_python: str
    """The Python that decides about further attempts, on the job's first node."""
    signal_before_s: int | None
    """Seconds between the program's signal and the time limit; None: from the program's measurements."""
    left_out: dict[str, str]
    """Nodes excluded because a check found them bad, each with the reason."""
    preflight: tuple[str, ...]
    """The command that checks the nodes first; empty: no check."""
    spare: int
    """Nodes requested beyond ``nodes``; the preflight chooses."""
    min_nodes: int | None
    """The fewest nodes that are a world; None: all of them."""
    container: Inside | None
    """None: the program runs directly on the node."""
    untrusted: tuple[str, ...] = ()
    """Values from a repository's untrusted site file: such a job cannot be submitted."""
    messages: tuple[str, ...] = ()
    """Notes of the centre for its users, and the partition's effects on such a job."""
    policies: tuple[AppliedPolicy, ...] = ()
    """The centre's policies that hold for it."""
    monitor: bool = False
    """Whether each node runs a sampler."""
    figures: dict[str, Figure] = {}
    """Figures of merit that are read from the log, by name; the first one is the figure of the run."""
    notify: tuple[str, ...] = ()
    """Options of ``notify.sh``, which reports the job's end; empty: no reports."""
    layers: tuple[Layer, ...] = ()
    """The request by layers, for a new request with changes."""

    @property
    def kind(self) -> SchedulerKind:
        """The capabilities of its scheduler."""
        return find_kind(self.scheduler)

    @property
    def batch_script(self) -> bytes | None:
        """Whether the program is a script that starts its tasks itself: it runs once, on the first node."""
        return next((layer.batch_script for layer in self.layers if layer.batch_script is not None), None)

    def describe_option(self, field: str) -> str:
        """An option for messages: its value, and where it was read."""
        return f"{field}={getattr(self.resources, field)} ({self.sources.get(field, 'default')})"

    @property
    def ntasks(self) -> int:
        """Tasks over all nodes: the world size; of a range of nodes the largest."""
        return (self.max_nodes or self.nodes) * self.ntasks_per_node

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each node; 0: none requested."""
        gpus = self.resources.gpus_per_node
        return gpus if isinstance(gpus, int) else 0


class Plan(NamedTuple):
    """A complete submission: script, run folder, command; a dry run prints it."""

    job: Job
    script: str
    """Text of ``job.sh``."""
    run_dir: Path
    command: tuple[str, ...]
    """The command that hands the script to the scheduler."""
    made_by: str
    """The command line that made the request."""
