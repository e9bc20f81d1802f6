"""Command lines of Slurm: one function for each that hpcjobs runs, on login hosts and on nodes.

No other module spells one. So an option that an answer depends on, such as ``--all`` for hidden partitions, is given
here, once for everybody who asks. Python 3.6, standard library: the node's program has this module too.
"""

import re
import time
from typing import Dict, Iterable, List, Optional, Sequence

NAMES = (
    *("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "sprio", "srun", "sdiag", "sacctmgr"),
    *("salloc", "sreport", "sshare", "sstat"),
)
"""Slurm's programs."""
HOST_NAMES = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
"""Line of a job script that prints the names of the job's nodes, one per line."""
FENCES = ("SLURM_PMIX_FENCE", "ring")
"""The variable that Slurm's PMIx plugin reads in the environment of a step, and its value: the fence between the ranks
of several nodes. With the tree, the default of some fences, ranks may leave MPI_Init while others have not reached its
end, if nodes are busy at the start. The first message kills the late ranks: SIGSEGV in Open MPI's TCP. The ring numbers
the contribution of each node, and no rank died with it (docs/horovod.md has the counts)."""
_QUEUE_LETTERS = {
    "JobID": "i", "JobName": "j", "State": "T", "Reason": "r", "Partition": "P", "NodeList": "N", "NNodes": "D",
    "Submit": "V", "Start": "S", "Elapsed": "M", "TimeLimit": "l", "TimeLeft": "L", "Command": "o", "User": "u",
    "Account": "a", "QOS": "q", "Priority": "Q",
}  # fmt: skip
"""sacct's names of squeue's columns. squeue's own long names (--Format) cut values to a width."""
_LISTED = ("--noheader", "--parsable2")
_EARLIEST = 86_400.0
"""sacct refuses times before 1970, in any time zone."""


# --- environment


def cluster_env(slurm_conf: Optional[str]) -> Dict[str, str]:
    """Variables that select the cluster of ``slurm_conf``; None: the command finds a cluster by itself."""
    return {"SLURM_CONF": slurm_conf} if slurm_conf else {}


REQUESTED_FOR = "HPCJOBS_REQUEST"
"""In the environment of a job that hpcjobs submitted: its run folder. A job that it submits itself has none."""


def submission_env(slurm_conf: Optional[str], run_dir: str) -> Dict[str, str]:
    """The same for a submission, whose environment sbatch hands on to the job."""
    return dict(cluster_env(slurm_conf), **{REQUESTED_FOR: run_dir})


def question_env(slurm_conf: Optional[str]) -> Dict[str, str]:
    """The same for a question: times in seconds, and indices of pending array tasks not cut to 64 characters."""
    return dict(cluster_env(slurm_conf), SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0")


# --- answers

_NO_CONTACT = re.compile(
    r"unable to contact slurm controller|connection refused|temporarily unable|resource temporarily unavailable"
    r"|standby mode|connect failure|communication connection failure|not responding|no route to host"
    r"|problem talking to the database|unable to connect to database|persistent connection",
    re.IGNORECASE,
)
_ANSWER_LOST = re.compile(
    r"timed out|zero bytes|receive failure|shutdown failure|reset by peer|unexpected message|did not answer within",
    re.IGNORECASE,
)
_USAGE_ERROR = re.compile(r'^Try "?\w+ --help"? for more information', re.MULTILINE)
_NOT_STORED = re.compile(r"(?:[^ -~]|\?)+")


def fold_stored(text: str) -> str:
    """Make names and paths comparable: slurmdbd stores question marks for characters outside Latin-1, and ` for "."""
    return _NOT_STORED.sub("?", text.strip().replace('"', "`"))


def is_unanswered(message: str) -> bool:
    """Whether a command failed because its daemon restarts or is overloaded: asking again may help.

    Any other message of Slurm is final.
    """
    return _NO_CONTACT.search(message) is not None or is_answer_lost(message)


def is_answer_lost(message: str) -> bool:
    """Whether the daemon may have executed the command, and only its answer was lost."""
    return _ANSWER_LOST.search(message) is not None


def has_no_answer(code: int, message: str) -> bool:
    """Whether a command that failed was killed, or its daemon did not answer: not a refusal."""
    return code < 0 or code >= 128 or is_unanswered(message)


def is_usage_error(message: str) -> bool:
    """Whether a command of Slurm did not understand its own options, and so asked nothing of its daemon."""
    return _USAGE_ERROR.search(message) is not None


# --- jobs


def list_queue(
    columns: Iterable[str],
    separator: str,
    *,
    mine: bool = False,
    states: Sequence[str] = (),
    partition: Optional[str] = None,
    siblings: bool = False,
) -> List[str]:
    """``squeue`` of these columns, by sacct's names. ``states``: ``all`` for ended jobs too; none: pending, running.

    ``siblings``: in a federation also the rows of the other clusters, where jobs of this one may run.
    """
    letters = separator.join("%" + _QUEUE_LETTERS[column] for column in columns)
    argv = ["squeue", "--all", "--noheader", "--format=" + letters]
    argv += ["--me"] if mine else []
    argv += ["--sibling"] if siblings else []
    argv += ["--states=" + ",".join(states)] if states else []
    return [*argv, "--partition=" + partition] if partition else argv


def list_accounted(
    columns: Iterable[str],
    separator: str,
    *,
    jobs: Iterable[str] = (),
    users: Optional[Iterable[str]] = (),
    since: Optional[float] = None,
    until: Optional[float] = None,
    clusters: Optional[str] = None,
    siblings: bool = False,
    steps: bool = False,
    attempts: bool = False,
) -> List[str]:
    """``sacct`` of these columns.

    Args:
        users: owners of the jobs; None: everybody; empty: the caller.
        since, until: seconds since 1970.
        siblings: as in `list_queue`.
        steps: with a row for each step of a job.
        attempts: with a row for each start of a requeued job.
    """
    argv = ["sacct", *_LISTED, "--noconvert", "--delimiter=" + separator, "--format=" + ",".join(columns)]
    argv += [] if steps else ["--allocations"]
    argv += ["--duplicates"] if attempts else []
    argv += ["--clusters=" + clusters] if clusters else []
    argv += ["--federation"] if siblings else []
    ids = ",".join(jobs)
    argv += ["--jobs=" + ids] if ids else []
    names = None if users is None else ",".join(users)
    argv += ["--allusers"] if names is None else ["--user=" + names] if names else []
    argv += [] if since is None else ["--starttime=" + _local_time(since)]
    return [*argv, *([] if until is None else ["--endtime=" + _local_time(until)])]


def list_accounted_fields() -> List[str]:
    """``sacct`` that prints the names of its columns."""
    return ["sacct", "--helpformat"]


def list_steps(columns: Iterable[str], separator: str, jobs: Iterable[str]) -> List[str]:
    """``sstat`` of every step of these running jobs."""
    assert separator == "|", "sstat has no option for another separator"
    argv = ["sstat", "--allsteps", *_LISTED, "--noconvert", "--format=" + ",".join(columns)]
    return [*argv, "--jobs=" + ",".join(jobs)]


def show_job(job_id: Optional[str] = None, *, siblings: bool = False, local: bool = False) -> List[str]:
    """``scontrol`` that prints one job, or all, those in hidden partitions too. ``siblings``: as in `list_queue`.

    ``local``: in a federation only this cluster's record. In a job this is the one that says something: of a job that
    runs on another cluster than it was submitted to, the first record is REVOKED.
    """
    argv = ["scontrol", "--all", "--oneliner", *(["--sibling"] if siblings else []), *(["--local"] if local else [])]
    return [*argv, "show", "job", *([] if job_id is None else [job_id])]


def submit(script: str, *options: str) -> List[str]:
    """``sbatch`` that prints the id of the job."""
    return ["sbatch", "--parsable", *options, script]


def check_submission(*arguments: str) -> List[str]:
    """``sbatch`` that only checks whether the controller would take the job, and when it would start."""
    return ["sbatch", "--test-only", *arguments]


def cancel(job_ids: Iterable[str]) -> List[str]:
    """``scancel``, silent about jobs that have ended."""
    return ["scancel", "--quiet", *job_ids]


def signal(job_ids: Iterable[str], name: str, *, batch_script: bool = False) -> List[str]:
    """``scancel`` that sends a signal to the steps of jobs; with ``batch_script`` to the batch script too."""
    return ["scancel", "--signal=" + name, *(["--full"] if batch_script else []), *job_ids]


def control(verb: str, job_ids: Iterable[str]) -> List[str]:
    """``scontrol`` ``hold``, ``release``, ``requeue`` or ``requeuehold``."""
    return ["scontrol", verb, ",".join(job_ids)]


def update(job_id: str, *settings: str) -> List[str]:
    """``scontrol`` that changes ``Name=value`` settings of a job."""
    return ["scontrol", "update", "JobId=" + job_id, *settings]


# --- steps and allocations


def start_step(options: Iterable[str], program: Iterable[str] = ()) -> List[str]:
    """``srun`` that fills the allocation it runs in."""
    return ["srun", *options, *program]


def start_on(hosts: Sequence[str], *options: str) -> List[str]:
    """``srun`` that starts one task on each of ``hosts`` of the allocation it runs in."""
    return ["srun", *_one_task_each(hosts), *options]


def start_beside(job_id: str, hosts: Sequence[str], *options: str) -> List[str]:
    """``srun`` that starts one task on each of ``hosts`` within a running job, together with its other steps."""
    return ["srun", "--jobid=" + job_id, "--overlap", "--mpi=none", *_one_task_each(hosts), *options]


def allocate(options: Iterable[str], *, terminal: bool) -> List[str]:
    """``salloc`` that runs the following program on the first node. Its step reserves no resources of later steps."""
    step = ["srun", "--interactive", "--preserve-env", "--mpi=none", "--nodes=1", "--ntasks=1"]
    return ["salloc", *options, *step, *(["--pty"] if terminal else [])]


def list_mpi_types() -> List[str]:
    """``srun`` that prints the types of ``--mpi``."""
    return ["srun", "--mpi=list"]


def show_step_options() -> List[str]:
    """``srun`` that prints its options, with the options of the site's plugins."""
    return ["srun", "--help"]


# --- the cluster


def show_version() -> List[str]:
    return ["scontrol", "--version"]


def ping_controller() -> List[str]:
    return ["scontrol", "ping"]


def show_config() -> List[str]:
    """``scontrol`` that prints the cluster's configuration."""
    return ["scontrol", "show", "config"]


def show_partitions(name: Optional[str] = None) -> List[str]:
    """``scontrol`` that prints one partition, or all."""
    argv = ["scontrol", "--all", "--oneliner", "show", "partition"]
    return argv if name is None else [*argv, name]


def show_nodes() -> List[str]:
    return ["scontrol", "--all", "--oneliner", "show", "node"]


def show_licenses() -> List[str]:
    return ["scontrol", "--oneliner", "show", "licenses"]


def show_reservations() -> List[str]:
    return ["scontrol", "--oneliner", "show", "reservation"]


def show_host_names(nodes: str) -> List[str]:
    """``scontrol`` that prints the names in a list such as ``n[1-4]``, one per line."""
    return ["scontrol", "show", "hostnames", nodes]


def show_statistics() -> List[str]:
    """``sdiag``, which prints the time of the controller's clock."""
    return ["sdiag"]


def list_node_states(nodes: Sequence[str] = ()) -> List[str]:
    """``sinfo`` that prints name and state of each node, in hidden partitions too."""
    argv = ["sinfo", "--all", "--noheader", "--Node", "--format=%N %T"]
    return [*argv, "--nodes=" + ",".join(nodes)] if nodes else argv


def count_nodes_by_state(partition: Optional[str]) -> List[str]:
    """``sinfo`` that prints partition, number and state of nodes; ``partition`` may be several with commas."""
    argv = ["sinfo", "--all", "--noheader", "--format=%R %D %T"]
    return [*argv, "--partition=" + partition] if partition else argv


def list_partitions() -> List[str]:
    """``sinfo`` that prints the names of partitions that are not hidden from the user."""
    return ["sinfo", "--noheader", "--format=%R"]


# --- the accounting's own tables


def list_associations(columns: Iterable[str], **where: str) -> List[str]:
    """``sacctmgr`` of the associations ``where`` (``user="ada"``, ``account="chem"``)."""
    return _show_accounting("associations", columns, *(name + "=" + value for name, value in where.items()))


def show_default_account(user: str) -> List[str]:
    return _show_accounting("user", ["DefaultAccount"], user)


def list_qos(columns: Iterable[str]) -> List[str]:
    return _show_accounting("qos", columns)


def list_clusters() -> List[str]:
    return _show_accounting("cluster", ["cluster"])


def list_node_events(columns: Iterable[str], nodes: Iterable[str], since: float) -> List[str]:
    """``sacctmgr`` of the events of ``nodes`` after ``since`` (seconds since 1970)."""
    return _show_accounting("event", columns, "nodes=" + ",".join(nodes), "start=" + _local_time(since))


def check_accounting() -> List[str]:
    """``sacct`` without jobs, to find out whether the user may query it."""
    return ["sacct", *_LISTED, "--starttime=now", "--format=JobID"]


def change_accounting(*arguments: str) -> List[str]:
    """``sacctmgr`` that adds or changes something without asking back."""
    return ["sacctmgr", "--immediate", "--quiet", *arguments]


def _show_accounting(table: str, columns: Iterable[str], *where: str) -> List[str]:
    return ["sacctmgr", *_LISTED, "show", table, *where, "format=" + ",".join(columns)]


def _one_task_each(hosts: Sequence[str]) -> List[str]:
    count = str(len(hosts))
    return ["--nodes=" + count, "--ntasks=" + count, "--ntasks-per-node=1", "--nodelist=" + ",".join(hosts)]


def _local_time(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(moment, _EARLIEST)))


# --- host lists, without scontrol, which containers lack

HOST_PART = re.compile(r"((?:[^,\[]|\[[^\]]*\])+)")
"""A part of a host list, between commas outside brackets."""
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?\Z")
_LONGEST_RANGE = 64 * 1024
"""Slurm's own limit (MAX_RANGE of its hostlist.c), here of all names in a list."""
_LONGEST_NAME = 255
"""Of a host in ranges."""


def hosts_of(nodelist: str) -> List[str]:
    """``tu[01-03,7],x1`` -> ``tu01 tu02 tu03 tu7 x1``; numbers keep their zeros.

    Raises ValueError: a range that is none, or of too many hosts.
    """
    hosts: List[str] = []
    for part in HOST_PART.findall(nodelist):
        hosts += _expand(part, _LONGEST_RANGE - len(hosts)) if "[" in part else [part]
    return hosts


def read_hosts(nodelist: Optional[str]) -> List[str]:
    """As `hosts_of` of a list that Slurm or a file gave; one that cannot be read is one name, as it is printed."""
    try:
        return hosts_of(nodelist or "")
    except ValueError:
        return [nodelist or ""]


def _expand(part: str, most: int) -> List[str]:
    names, rest = [""], part
    while rest:
        before, bracket, rest = rest.partition("[")
        inside, _, rest = rest.partition("]")
        numbers = _numbers(inside) if bracket else [""]
        if len(names) * len(numbers) > most or len(names[0]) + len(before) > _LONGEST_NAME:
            raise ValueError(f"{part[:80]!r} in a host list is more than {_LONGEST_RANGE} hosts, or names too long")
        names = [f"{name}{before}{number}" for name in names for number in numbers]
    return names


def _numbers(inside: str) -> List[str]:
    numbers: List[str] = []
    for piece in inside.split(","):
        match = _RANGE.match(piece)
        if match is None:
            raise ValueError(f"{piece[:80]!r} in a host list is no number and no range")
        first, last = match.group(1), match.group(2) or match.group(1)
        if len(numbers) + int(last) - int(first) >= _LONGEST_RANGE:
            raise ValueError(f"{piece!r} in a host list is a range of more than {_LONGEST_RANGE} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
