"""The table of sbatch's options, and the resources that a job requests by them.

Each long option of sbatch from Slurm 22.05 to 25.05 is one entry: the own options are the fields of `Resources`, all
others are listed in `_OTHER_OPTIONS`. An entry is everything that hpcjobs knows of an option. The options of the
command line and their help, spec files and site files, completion, batch scripts, environment variables, ``update``,
the local queue, docs/sbatch_options.md and docs/site_keys.md read it.
"""

import re
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from hpcjobs.errors import nearest
from hpcjobs.site.checks import Frozen, check_count, check_line
from hpcjobs.units import requested_memory, requested_time

_NODES = re.compile(r"(\d{1,8})(?:-(\d{1,8}))?\Z", re.ASCII)
_GPUS = re.compile(r"(?:(?P<model>[A-Za-z0-9][\w.-]*):)?(?P<count>\d{1,8})\Z", re.ASCII)
_GPU_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::(?!\d+[kKmMgGtTpP]\Z)(?P<model>(?=[\w.-]*[A-Za-z])[A-Za-z0-9][\w.-]*|\d+(?=:)))?"
    r"(?:[:=](?P<count>\d{1,8}))?(?:\(.*\))?\Z",
    re.ASCII,
)
_LIKE_GPUS = re.compile(r"\s*(?:gres\s*[:/]\s*)?gpu(?![\w.-])", re.ASCII | re.IGNORECASE)
"""A request for GPUs, however it is spelled: the ranks of a job are counted by its GPUs."""


def node_range(nodes: int | str) -> tuple[int, int]:
    """The fewest and the most nodes of ``4`` or ``2-4``. Raises ValueError: neither of these."""
    match = _NODES.match(str(nodes))
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if match is not None and match[2] is None and least < 1:
        raise ValueError(f"nodes must be 1 or more, not {nodes}")
    if nodes == "auto":
        raise ValueError("nodes 'auto' is an option of hpcjobs submit alone: -N auto")
    if not 1 <= least <= most:
        raise ValueError(f"nodes {nodes!r} is not understood; write 4, or 2-4 for a range")
    return least, most


def gpus_and_model(gpus: int | str, field: str = "gpus_per_node") -> tuple[int, str | None]:
    """The count, and the model if one is named, of ``4`` or ``v100:4``. Raises ValueError: neither of these."""
    match = _GPUS.match(str(gpus))
    if match is None:
        raise ValueError(f"{field} {gpus!r} is not understood; write 4, or v100:4 for a model")
    return int(match["count"]), match["model"]


def gpus_in_gres(gres: str) -> tuple[list[str], list[str]]:
    """Split a ``--gres`` value into GPU requests, spelled as in ``gpus_per_node``, and all other requests.

    Raises ValueError: a request that Slurm may take for GPUs is not understood.
    """
    gpus: list[str] = []
    others: list[str] = []
    for part in re.split(r",(?![^()]*\))", gres):
        match = _GPU_GRES.match(part)
        if match is None and _LIKE_GPUS.match(part):
            raise ValueError(f"gres {part!r} is not understood; write gpu:4, or gpu:v100:4 for a model")
        if match is None:
            others.append(part)
        else:
            gpus.append((f"{match['model']}:" if match["model"] else "") + (match["count"] or "1"))
    return gpus, others


class Argument(Enum):
    """Whether an option has a value."""

    TEXT = "VALUE"
    COUNT = "N"
    OPTIONAL = "[VALUE]"
    NONE = ""


class ValueKind(Enum):
    """How the value of an option is read and checked."""

    TEXT = "text"
    COUNT = "count"
    NUMBER = "number, also negative"
    SWITCH = "switch"
    TIME = "time"
    MEMORY = "memory"
    GPUS = "GPUs"
    NODES = "nodes"


class Treatment(Enum):
    """Treatment of an option by hpcjobs."""

    FIELD = "own option"
    COMMAND = "own option of submit"
    PASSED = "passed through by --sbatch"
    REFUSED = "refused"


class LocalEffect(Enum):
    """Effect of an own option on a job of the local queue."""

    HONOURED = "honoured"
    UNUSED = "no effect"
    NOTED = "no effect, with a note"
    """It chooses among the nodes and queues of a cluster, or only a cluster can act on it."""
    REFUSED = "refused"
    """It would change when or where the job runs, and the local queue cannot do this."""


class InScript(Enum):
    """Treatment of an option on an ``#SBATCH`` line of a batch script."""

    TREATED = "treated as on the command line"
    PASSED = "passed through"
    LEFT_OUT = "left out"
    """The run folder has the output, and some options are of the command sbatch itself."""


class Hours(Enum):
    """How an option counts for a budget (HPCJOBS_BUDGET)."""

    COUNTED = "its nodes, CPUs, GPUs, tasks or time are counted"
    NONE = "it adds nothing"
    CPUS = "it may add CPUs"
    UNKNOWN = "it may add anything"


class Sbatch(NamedTuple):
    """One long option of sbatch."""

    name: str
    short: str | None = None
    argument: Argument = Argument.TEXT
    treatment: Treatment = Treatment.FIELD
    reason: str = ""
    """Reason of a refusal, and the alternative; or a remark."""
    versions: str = ""
    """The versions of Slurm that have it, unless all from 22.05 to 25.05 do."""
    help: str = ""
    """Its line in the help and in docs/site_keys.md."""
    kind: ValueKind = ValueKind.TEXT
    section: str = ""
    """Section of the help; empty: the help names it in a list of further options."""
    metavar: str | None = None
    """Value in the help, if it is optional; the option is then a switch that may have a value behind ``=``."""
    bare: object = True
    """Value of the field if the option has no argument in a batch script."""
    least: int = 1
    """Smallest value of a count."""
    sets: str = ""
    """The field that it sets, if it is not named after the option."""
    variable: str = ""
    """Environment variable without ``SBATCH_`` or ``SALLOC_`` that users set for all their jobs."""
    update: str = ""
    """Name in ``scontrol update``, where it is another; empty: `hpcjobs update` takes scontrol's own names alone."""
    shown: str = ""
    """Name in ``scontrol show job``, if a job with the same request needs it again."""
    alternative: str = ""
    """Options with the same word request one thing: a layer that uses one replaces the others of lower layers."""
    local: LocalEffect = LocalEffect.UNUSED
    in_script: InScript = InScript.TREATED
    acts: bool = False
    """Slurm copies files, sends mail or contacts hosts because of it: in a project's site file it needs trust."""
    personal: bool = False
    """Belongs to the user on the real cluster: a sandbox that plays the site does not know it."""
    first_run: bool = False
    """Delays the start of one submission: a repetition and an estimate leave it out."""
    shared: bool = False
    """Chooses queue and accounting: a small job that continues a sweep has the same value."""
    only_sbatch: bool = False
    """salloc does not have it."""
    hours: Hours = Hours.UNKNOWN
    """A budget refuses a job whose hours cannot be counted."""

    @property
    def field(self) -> str:
        """Its name in spec files, site files and Python."""
        return self.sets or self.name.replace("-", "_")


_T, _N, _O, _F = Argument.TEXT, Argument.COUNT, Argument.OPTIONAL, Argument.NONE
_ARGUMENTS = {ValueKind.COUNT: _N, ValueKind.NUMBER: _N, ValueKind.SWITCH: _F}
Text: TypeAlias = Annotated[str | None | UnsetType, ValueKind.TEXT]
Count: TypeAlias = Annotated[int | None | UnsetType, ValueKind.COUNT]
Number: TypeAlias = Annotated[int | None | UnsetType, ValueKind.NUMBER]
Switch: TypeAlias = Annotated[bool | None | UnsetType, ValueKind.SWITCH]
Time: TypeAlias = Annotated[str | None | UnsetType, ValueKind.TIME]
Memory: TypeAlias = Annotated[int | str | None | UnsetType, ValueKind.MEMORY]
Gpus: TypeAlias = Annotated[int | str | None | UnsetType, ValueKind.GPUS]
Nodes: TypeAlias = Annotated[int | str | None | UnsetType, ValueKind.NODES]
_MOST, _MORE, _WHEN, _OUTPUT = "Used most", "Resources", "When and where", "Output"
_COUNTED, _FREE, _CPUS = Hours.COUNTED, Hours.NONE, Hours.CPUS
_HONOURED, _NOTED, _REFUSED = LocalEffect.HONOURED, LocalEffect.NOTED, LocalEffect.REFUSED


def _own(help: str, short: str | None = None, local: LocalEffect = LocalEffect.UNUSED, **facts: Any) -> Sbatch:
    """An own option; its field gives it the name, and its type the kind of its value."""
    return Sbatch("", short, help=help, local=local, **facts)


class Resources(Frozen, frozen=True):
    """Options of sbatch that a job requests: each field is a long option, spelled with underscores.

    A field left out keeps the value of the layer below (site < partition < spec file < flags); an
    explicit null clears it. To support a further option of sbatch, add a field here.
    """

    # fmt: off
    partition: Annotated[Text, _own("Partition, or several, a,b: one that fits is enough.", "p", _NOTED,
        section=_MOST, update="Partition", variable="PARTITION", shared=True, hours=_FREE)] = UNSET
    nodes: Annotated[Nodes, _own("Number of nodes: 4, or 2-4 for a range.", "N", _HONOURED,
        section=_MOST, update="NumNodes", hours=_COUNTED)] = UNSET
    ntasks: Annotated[Count, _own("Total number of tasks (ranks), divided evenly among the nodes.", "n", _HONOURED,
        section=_MORE, hours=_COUNTED)] = UNSET
    ntasks_per_node: Annotated[Count, _own("Tasks (ranks) per node [one per GPU].", None, _HONOURED,
        section=_MOST, hours=_COUNTED)] = UNSET
    cpus_per_task: Annotated[Count, _own("CPUs per task.", "c", _HONOURED,
        section=_MOST, alternative="cpus", shown="CPUs/Task", hours=_COUNTED)] = UNSET
    cpus_per_gpu: Annotated[Count, _own("CPUs per GPU; an alternative to CPUs per task.", None, _HONOURED,
        alternative="cpus", variable="CPUS_PER_GPU", hours=_COUNTED)] = UNSET
    gpus: Annotated[Gpus, _own("Total number of GPUs, divided evenly among the nodes: 8, or v100:8.", "G", _HONOURED,
        section=_MORE, alternative="gpus", variable="GPUS", hours=_COUNTED)] = UNSET
    gpus_per_node: Annotated[Gpus, _own("GPUs per node: 4, or v100:4 for a model.", None, _HONOURED,
        section=_MOST, alternative="gpus", variable="GPUS_PER_NODE", hours=_COUNTED)] = UNSET
    gpus_per_task: Annotated[Gpus, _own("GPUs per task: 1, or v100:1; a task sees only its GPUs.", None, _HONOURED,
        alternative="gpus", variable="GPUS_PER_TASK", hours=_COUNTED)] = UNSET
    ntasks_per_gpu: Annotated[Count, _own("Tasks that share each GPU.", None, _HONOURED, hours=_COUNTED)] = UNSET
    mem: Annotated[Memory, _own("Memory per node: 64G; a number without a unit is megabytes, 0 all memory.", None,
        _HONOURED, section=_MOST, alternative="memory", variable="MEM_PER_NODE", shown="MinMemoryNode",
        hours=_FREE)] = UNSET
    mem_per_cpu: Annotated[Memory, _own("Memory per CPU.", None, _HONOURED,
        alternative="memory", variable="MEM_PER_CPU", shown="MinMemoryCPU", hours=_FREE)] = UNSET
    mem_per_gpu: Annotated[Memory, _own("Memory per GPU.", None, _HONOURED,
        alternative="memory", variable="MEM_PER_GPU", hours=_FREE)] = UNSET
    time: Annotated[Time, _own("Time limit: 2h, 90m, 1-12:00:00, UNLIMITED; 90 is minutes.", "t", _HONOURED,
        section=_MOST, update="TimeLimit", variable="TIMELIMIT", hours=_COUNTED)] = UNSET
    time_min: Annotated[Time, _own("Shortest acceptable time limit: Slurm may lower the limit to start the job sooner.",
        None, _NOTED, update="TimeMin", hours=_FREE)] = UNSET
    account: Annotated[Text, _own("Account to charge for the job.", "A", _NOTED,
        section=_MOST, update="Account", variable="ACCOUNT", shown="Account", personal=True, shared=True,
        hours=_FREE)] = UNSET
    qos: Annotated[Text, _own("Quality of service.", "q", _NOTED,
        section=_WHEN, update="QOS", variable="QOS", shown="QOS", shared=True, hours=_FREE)] = UNSET
    constraint: Annotated[Text, _own("Features that the nodes must have: ib&a100.", "C", _NOTED,
        section=_MORE, update="Features", variable="CONSTRAINT", shown="Features", shared=True, hours=_COUNTED)] = UNSET
    exclusive: Annotated[bool | str | None | UnsetType, ValueKind.TEXT, _own("Share the nodes with no other job.", None,
        _HONOURED, section=_MORE, argument=_O, metavar="[=user|mcs|topo]", hours=_COUNTED)] = UNSET
    array: Annotated[Text, _own("Job array: 0-9, or 0-9%2 for two tasks at once.", "a", _HONOURED,
        section=_WHEN, hours=_COUNTED)] = UNSET
    dependency: Annotated[Text, _own("Start after other jobs: afterok:4711, singleton.", "d", _HONOURED,
        section=_WHEN, update="Dependency", first_run=True, hours=_FREE)] = UNSET
    begin: Annotated[Text, _own("Earliest start: 20:00, now+1hour.", "b", _REFUSED, update="StartTime",
        hours=_FREE)] = UNSET
    deadline: Annotated[Text, _own("Remove the job if it cannot end by then.", None, _REFUSED,
        update="Deadline", hours=_FREE)] = UNSET
    nodelist: Annotated[Text, _own("Nodes that the job must have: n[01-04], or ./FILE; local: hosts of mpirun.",
        "w", _NOTED, section=_MORE, update="ReqNodeList", alternative="nodelist", acts=True, hours=_COUNTED)] = UNSET
    nodefile: Annotated[Text, _own("File with the names of these nodes, separated by commas or newlines.", "F",
        alternative="nodelist", acts=True)] = UNSET
    exclude: Annotated[Text, _own("Nodes that the job must not have; null also forgets the recorded bad nodes.", "x",
        _NOTED, section=_MORE, update="ExcNodeList", hours=_FREE)] = UNSET
    reservation: Annotated[Text, _own("Reservation that the job runs in.", None, _NOTED, update="ReservationName",
        variable="RESERVATION", shown="Reservation", personal=True, shared=True, hours=_FREE)] = UNSET
    licenses: Annotated[Text, _own("Licences, NAME:COUNT.", "L", _REFUSED, update="Licenses", shown="Licenses",
        hours=_FREE)] = UNSET
    gres: Annotated[Text, _own("Generic resources per node; GPUs among them count as GPUs per node.", None, _REFUSED,
        update="Gres", variable="GRES", shown="TresPerNode", hours=_COUNTED)] = UNSET
    tmp: Annotated[Text, _own("Least disk space of a node's temporary folder.", None, _NOTED, hours=_FREE)] = UNSET
    clusters: Annotated[Text, _own("Refused in a job: give another cluster a site of its own.", "M", _REFUSED,
        treatment=Treatment.REFUSED, shared=True,
        reason="write a site file for that cluster, with its slurm_conf, and use --site", hours=_FREE)] = UNSET
    comment: Annotated[Text, _own("Text that the accounting keeps.", update="Comment", hours=_FREE)] = UNSET
    wckey: Annotated[Text, _own("Workload characterization key.", update="WCKey", variable="WCKEY",
        personal=True, shared=True, hours=_FREE)] = UNSET
    mail_type: Annotated[Text, _own("When to send mail: END,FAIL.", None, _NOTED, section=_OUTPUT,
        update="MailType", hours=_FREE)] = UNSET
    mail_user: Annotated[Text, _own("Address of the mail.", None, _NOTED, section=_OUTPUT,
        update="MailUser", acts=True, hours=_FREE)] = UNSET
    nice: Annotated[Number, _own("Lower the priority by this number.", None, _NOTED,
        argument=_O, bare="100", update="Nice", hours=_FREE)] = UNSET
    priority: Annotated[Number, _own("Priority, for users who may set one.", None, _NOTED, update="Priority",
        hours=_FREE)] = UNSET
    hold: Annotated[Switch, _own("Do not start the job before it is released.", "H", _REFUSED, first_run=True,
        hours=_FREE)] = UNSET
    requeue: Annotated[Switch, _own("Whether Slurm may start the job again after a node failure or preemption.",
        update="Requeue", only_sbatch=True, hours=_FREE)] = UNSET
    open_mode: Annotated[Literal["append", "truncate"] | None | UnsetType, ValueKind.TEXT, _own(
        "Whether a job that starts again continues or replaces its log.", shared=True, only_sbatch=True,
        hours=_FREE)] = UNSET
    signal: Annotated[Text, _own("Signal ahead of the time limit, B:USR1@300; --signal-before is usually better.", None,
        _HONOURED, hours=_FREE)] = UNSET
    switches: Annotated[Text, _own("Most leaf switches, and the time to wait for them: 1@2h.", None, _NOTED,
        hours=_FREE)] = UNSET
    contiguous: Annotated[Switch, _own("Only adjacent nodes.", None, _NOTED, hours=_FREE)] = UNSET
    oversubscribe: Annotated[Switch, _own("Share nodes and CPUs with other jobs.", "s", _NOTED, hours=_FREE)] = UNSET
    overcommit: Annotated[Switch, _own("Allow more tasks than CPUs.", "O", hours=_FREE)] = UNSET
    spread_job: Annotated[Switch, _own("Use as many nodes as possible.", None, _NOTED, hours=_FREE)] = UNSET
    core_spec: Annotated[Count, _own("Cores of each node that are left to the system.", "S", least=0)] = UNSET
    sockets_per_node: Annotated[Count, _own("Least number of sockets of each node.")] = UNSET
    cores_per_socket: Annotated[Count, _own("Least number of cores of each socket.")] = UNSET
    threads_per_core: Annotated[Count, _own("Threads of each core to use.", hours=_CPUS)] = UNSET
    ntasks_per_socket: Annotated[Count, _own("Most tasks on each socket.", hours=_CPUS)] = UNSET
    ntasks_per_core: Annotated[Count, _own("Most tasks on each core.", hours=_CPUS)] = UNSET
    hint: Annotated[Text, _own("Binding of tasks: nomultithread, compute_bound, memory_bound.",
        variable="HINT", hours=_CPUS)] = UNSET
    distribution: Annotated[Text, _own("Distribution of tasks over nodes and sockets: block:cyclic.", "m",
        hours=_FREE)] = UNSET
    cpu_freq: Annotated[Text, _own("Frequency of the CPUs.", hours=_FREE)] = UNSET
    gpu_freq: Annotated[Text, _own("Frequency of the GPUs.", hours=_FREE)] = UNSET
    network: Annotated[Text, _own("Options of the switch plugin or the Slingshot plugin.", hours=_FREE)] = UNSET
    power: Annotated[Text, _own("Power management.", versions="not in newer ones", hours=_FREE)] = UNSET
    prefer: Annotated[Text, _own("Features that the nodes should have if such nodes are free.", None, _NOTED,
        hours=_FREE)] = UNSET
    no_kill: Annotated[Switch, _own("Continue when a node of the job fails; set by --min-nodes.", "k",
        argument=_O, hours=_FREE)] = UNSET
    profile: Annotated[Text, _own("Data that acct_gather_profile records.", hours=_FREE)] = UNSET
    acctg_freq: Annotated[Text, _own("Interval at which usage is sampled.", hours=_FREE)] = UNSET
    bb: Annotated[Text, _own("Burst buffer.", None, _REFUSED, acts=True, hours=_FREE)] = UNSET
    bbf: Annotated[Text, _own("File that describes a burst buffer.", None, _REFUSED, acts=True, hours=_FREE)] = UNSET
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.gres, str):
            check_line(self.gres, "gres")
            self._move_gpus(self.gres)
        for field, option in FIELDS.items():
            value = getattr(self, field)
            if isinstance(value, int | str):
                normal = _normalize(value, field, option)
                if normal != value:
                    self._set(field, normal)

    def _move_gpus(self, gres: str) -> None:
        """GPUs have one field, whatever spelling asks for them: task layout and containers look there."""
        gpus, others = gpus_in_gres(gres)
        if not gpus:
            return
        beside = [f"{f}={value}" for f in GPU_FIELDS if isinstance(value := getattr(self, f), int | str)]
        if len(gpus) > 1 or beside:
            also = "" if len(gpus) > 1 else f" beside {', '.join(beside)}"
            raise ValueError(f"gres {gres!r}{also}: GPUs are requested twice; use gpus_per_node alone (4, or v100:4)")
        self._set("gpus_per_node", gpus[0])
        self._set("gres", ",".join(others) if others else UNSET)

    def _set(self, field: str, value: object) -> None:
        msgspec.structs.force_setattr(self, field, value)


def _normalize(value: int | str, field: str, option: Sbatch) -> int | str:
    """``value`` in Slurm's spelling. Raises ValueError: not a value of this kind."""
    if isinstance(value, str):
        check_line(value, field)
    match option.kind:
        case ValueKind.TIME | ValueKind.MEMORY:
            try:
                return (requested_time if option.kind is ValueKind.TIME else requested_memory)(str(value))
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from error
        case ValueKind.COUNT if isinstance(value, int):
            check_count(value, field, least=option.least)
        case ValueKind.NODES:
            least, most = node_range(value)
            return least if least == most else f"{least}-{most}"
        case ValueKind.GPUS:
            count, model = gpus_and_model(value, field)
            return f"{model}:{count}" if model else count
        case _:
            pass
    return value


def _declared_options() -> dict[str, Sbatch]:
    options: dict[str, Sbatch] = {}
    for field, annotation in Resources.__annotations__.items():
        *_, kind, option = annotation.__metadata__
        argument = _ARGUMENTS.get(kind, _T) if option.argument is _T else option.argument
        options[field] = option._replace(name=field.replace("_", "-"), kind=kind, argument=argument)
    return options


FIELDS: dict[str, Sbatch] = _declared_options()
"""Field of `Resources` -> its option."""
GPU_FIELDS = tuple(field for field, option in FIELDS.items() if option.kind is ValueKind.GPUS)


def fields_where(fact: str, value: object = True) -> tuple[str, ...]:
    """Fields of `Resources` with ``value`` for a ``fact`` of `Sbatch`."""
    return tuple(field for field, option in FIELDS.items() if getattr(option, fact) == value)


def is_option_where(name: str, fact: str, value: object = True) -> bool:
    """Whether ``name`` is a long option of sbatch that has ``value`` for a ``fact`` of `Sbatch`."""
    return name in OPTIONS and bool(getattr(OPTIONS[name], fact) == value)


def names_by_field(fact: str) -> dict[str, str]:
    """Field of `Resources` -> the name that it has elsewhere (a ``fact`` of `Sbatch`), for fields that have one."""
    return {field: name for field, option in FIELDS.items() if (name := getattr(option, fact))}


def check_fields(names: tuple[str, ...], what: str) -> None:
    """Refuse a name in ``what`` that is not an option of a job. Raises ValueError: names it."""
    for name in names:
        if name not in FIELDS:
            raise ValueError(f"{what} {name!r}: no option of a job; {nearest(name, FIELDS)}")


def _pass(names: str, argument: Argument, versions: str = "", **facts: Any) -> list[Sbatch]:
    """Options that are passed through, from ``name`` or ``name/letter``, separated by blanks."""
    pairs = [name.partition("/") for name in names.split()]
    return [
        Sbatch(name, letter or None, argument, Treatment.PASSED, versions=versions, **facts)
        for name, _, letter in pairs
    ]


def _submit(name: str, short: str | None, argument: Argument, reason: str = "", **facts: Any) -> Sbatch:
    return Sbatch(name, short, argument, Treatment.COMMAND, reason, hours=Hours.NONE, **facts)


def _refuse(name: str, short: str | None, argument: Argument, reason: str, **facts: Any) -> Sbatch:
    return Sbatch(name, short, argument, Treatment.REFUSED, reason, hours=Hours.NONE, **facts)


_LATER = "after 22.05"
_LOG = "the output is in the run folder; `hpcjobs logs` prints it"
_OF_COMMAND = "an option of the command sbatch itself"
_ENV = "--env NAME=VALUE, or --env NAME; as an #SBATCH line of a batch script it is passed through"
_SKIP, _KEEP = InScript.LEFT_OUT, InScript.PASSED
_OTHER_OPTIONS = (
    _submit("job-name", "J", _T, "also `--name`", sets="name"),
    _submit("chdir", "D", _T),
    _submit("no-requeue", None, _F, "`requeue: false` in files", sets="requeue", bare=False, only_sbatch=True),
    _submit("test-only", None, _F, in_script=_SKIP),
    _submit("parsable", None, _F, in_script=_SKIP),
    _submit("wait", "W", _F, in_script=_SKIP),
    _submit("wrap", None, _T),
    *_pass("cluster-constraint delay-boot gid gpu-bind gres-flags kill-on-invalid-dep", _T, hours=_FREE),
    *_pass("mcs-label mem-bind uid wait-all-nodes", _T, hours=_FREE),
    *_pass("extra-node-info/B mincpus thread-spec", _T),
    *_pass("batch", _T, only_sbatch=True, hours=_FREE),
    *_pass("gpus-per-socket", _T, kind=ValueKind.GPUS),
    *_pass("get-user-env", _O, hours=_FREE),
    *_pass("propagate", _O, only_sbatch=True, hours=_FREE),
    *_pass("reboot use-min-nodes", _F, hours=_FREE),
    *_pass("extra segment tres-bind", _T, _LATER, hours=_FREE),
    *_pass("tres-per-task", _T, _LATER),
    *_pass("oom-kill-step resv-ports", _O, _LATER, hours=_FREE),
    *_pass("consolidate-segments stepmgr", _F, _LATER, hours=_FREE),
    _refuse("output", "o", _T, _LOG, in_script=_SKIP),
    _refuse("error", "e", _T, _LOG, in_script=_SKIP),
    _refuse(
        "input", "i", _T, "a job has no standard input; the program must open the file itself (< FILE in a script)"
    ),
    _refuse("export", None, _T, _ENV, in_script=_KEEP, only_sbatch=True),
    _refuse("export-file", None, _T, _ENV, in_script=_KEEP, only_sbatch=True),
    _refuse(
        "container", None, _T, "sbatch would run the script itself in it; --container here names an image for tasks"
    ),
    _refuse("container-id", None, _T, "sbatch would run the script itself in it; see --container", versions=_LATER),
    _refuse("ignore-pbs", None, _F, "write it into the script: #SBATCH --ignore-pbs", in_script=_SKIP),
    _refuse("quiet", "Q", _F, _OF_COMMAND, in_script=_SKIP),
    _refuse("verbose", "v", _F, _OF_COMMAND, in_script=_SKIP),
    _refuse("usage", None, _F, _OF_COMMAND),
    _refuse("help", "h", _F, _OF_COMMAND),
    _refuse("version", "V", _F, _OF_COMMAND),
)
OPTIONS = {option.name: option for option in sorted((*FIELDS.values(), *_OTHER_OPTIONS), key=lambda row: row.name)}
ALIASES = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters", "workdir": "chdir", "share": "oversubscribe"}
"""Other names that sbatch has, or had, for an option."""
BY_LETTER = {option.short: option for option in OPTIONS.values() if option.short is not None}


def find_option(name: str) -> Sbatch | None:
    """The option of that long name, or the only one that begins with it: sbatch takes abbreviations too."""
    if (exact := ALIASES.get(name, name)) in OPTIONS:
        return OPTIONS[exact]
    beginning = {ALIASES.get(known, known) for known in (*OPTIONS, *ALIASES) if known.startswith(name)}
    return OPTIONS[beginning.pop()] if len(beginning) == 1 else None


def option_of(text: str) -> tuple[str, str | None]:
    """Option and value of ``NAME=VALUE`` or ``NAME``: the long option that the name, or its beginning, means."""
    name, equals, value = text.removeprefix("--").partition("=")
    option = find_option(name.strip())
    return (option.name if option is not None else name.strip()), value if equals else None
