"""Hints for Slurm's refusals of submissions, found by Slurm's words."""

from __future__ import annotations

_ACCOUNT = "sacctmgr show associations user=$USER lists what you may use"
_NODE = "no node has all of this: fewer CPUs, GPUs or less memory per node; `sinfo -N -l` lists what nodes have"
_RESERVATION = "`scontrol show reservation` lists the reservations, with their users, partitions and times"
_LIMITS = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` list the limits"

HINTS: tuple[tuple[str, str], ...] = (
    # Who asks.
    ("invalid account", f"name an account that the partition and your user have: -A ACCOUNT; {_ACCOUNT}"),
    ("invalid qos", f"name a QOS that the account and the partition allow: -q QOS; {_ACCOUNT}"),
    (
        "qosmax",
        f"a limit of the QOS for one job or user: fewer nodes, GPUs or a shorter --time, or another -q; {_LIMITS}",
    ),
    ("qosmin", f"the QOS has a least size of jobs: a larger job, or another -q; {_LIMITS}"),
    (
        "violates accounting/qos policy",
        f"fewer jobs in the queue, a smaller or a shorter job, or another -q or -A; {_LIMITS}",
    ),
    (
        "breached requested qos usage threshold",
        f"the account has used up its share for this QOS: another -q or -A; {_LIMITS}",
    ),
    (
        "user's group not permitted",
        "the partition is for certain groups: `scontrol show partition` names them (AllowGroups)",
    ),
    (
        "access/permission denied",
        "your user may not do this here, or not from this host: `scontrol show partition` has AllowGroups, AllocNodes",
    ),
    (
        "access denied to requested reservation",
        f"your user or account is not among the reservation's; {_RESERVATION}",
    ),
    ("invalid wckey", "name a workload key that you have: -o wckey=KEY; `sacctmgr show wckey` lists them"),
    ("user not found on host", "your user is not known on the controller: ask the administrators"),
    ("invalid user id", "your user is not known on the controller: ask the administrators"),
    ("invalid group id", "your group is not known on the controller: ask the administrators"),
    ("partition is set in the association", "your account is bound to one partition: name one with -p"),
    # Where and how large.
    ("invalid partition", "`sinfo -s` lists the partitions; the site file should agree"),
    ("no partition specified", "name a partition: -p PARTITION; `sinfo -s` lists them"),
    ("required partition not available", "the partition is down or drained: another -p; `sinfo -s` shows its state"),
    (
        "requested partition configuration not available",
        "the partition's limits or state do not allow it now: another -p, or a smaller job",
    ),
    (
        "nodes not in this partition",
        "the nodes named with -o nodelist belong to another partition: `sinfo -N -p PARTITION` lists its nodes",
    ),
    ("invalid node name", "`sinfo -N` lists the nodes; look at -o nodelist and -o exclude"),
    (
        "required node not available",
        "nodes named with -o nodelist are down, drained or reserved: `sinfo -R` says why",
    ),
    (
        "node count specification invalid",
        "more or fewer nodes than the partition allows: `scontrol show partition` has MinNodes and MaxNodes",
    ),
    ("node configuration is not available", _NODE),
    ("more processors requested than permitted", "fewer tasks or CPUs: `scontrol show partition` has MaxCPUsPerNode"),
    ("cpu count specification invalid", "--ntasks-per-node and --cpus-per-task do not fit together, or into a node"),
    ("task count specification invalid", "--nodes and --ntasks-per-node do not fit together"),
    ("task distribution specification invalid", "look at -o distribution: man sbatch lists the words"),
    ("more tasks than available processors", "fewer tasks per node, or -o overcommit=1"),
    (
        "memory required by task is not available",
        "less memory per node or CPU: `scontrol show partition` has MaxMemPerNode and MaxMemPerCPU",
    ),
    ("job size specification needs to be provided", "set the number of nodes or tasks: -N"),
    ("invalid feature specification", "no node has this feature: `sinfo -o '%f'` lists them; look at -o constraint"),
    ("invalid preferred feature", "no node has this feature: `sinfo -o '%f'` lists them; look at -o prefer"),
    ("--batch option is invalid", "the feature of --batch is not one of -o constraint"),
    (
        "invalid generic resource",
        "no node has this resource or GPU model: `sinfo -o '%G'` lists them; look at --gpus-per-node and -o gres",
    ),
    ("duplicate generic resource", "the same resource is requested twice in -o gres"),
    (
        "invalid gres specification",
        "GPUs with and without a model cannot be mixed: name the model in all of them, or in none",
    ),
    ("gres option unsupported", "this cluster has no select/cons_tres: `gpu_request: gres` in the site file"),
    ("insufficient gres", "fewer GPUs: `sinfo -o '%G'` lists what nodes have"),
    ("invalid trackable resource", "look at -o gres and -o licenses: `sacctmgr show tres` lists what there is"),
    ("invalid license", "`scontrol show licenses` lists the licenses; look at -o licenses"),
    ("multiple knl", "one -o constraint for all nodes"),
    ("invalid knl", "look at -o constraint: no node has this NUMA or MCDRAM mode"),
    ("more threads per core", "-o threads_per_core has more than the nodes have"),
    (
        "requested operation not supported",
        "the cluster's Slurm was set up without what is requested: leave the last option out",
    ),
    (
        "requested operation is presently disabled",
        "submitting is switched off here for now: `sinfo` and the site's news say more",
    ),
    # When.
    (
        "requested time limit is invalid",
        (
            "a shorter --time, or one at all: `sinfo -o '%P %l'` lists the limits, and the site file's max_time "
            "should say so"
        ),
    ),
    ("time limit specification required", "use --time: this cluster has no default"),
    ("invalid time-min", "-o time_min is no longer than --time and the partition's limit"),
    ("requested reservation is invalid", f"no reservation of that name for this job; {_RESERVATION}"),
    ("requested reservation not usable", f"it has not begun, has ended, or has no room for this job; {_RESERVATION}"),
    ("job dependency problem", "a job of --after is unknown or cannot end so: `hpcjobs ps` shows it"),
    (
        "invalid job array",
        "indices up to MaxArraySize - 1 (`scontrol show config | grep MaxArraySize`); a sweep submits more in parts",
    ),
    ("immediate execution impossible", "nothing is free now; leave immediate out, and the job waits"),
    ("invalid burst buffer", "look at -o bb and -o bbf"),
    ("burst buffer", "look at -o bb and -o bbf"),
    ("accounting frequency", "look at -o acctg_freq: man sbatch lists the words"),
    ("invalid nice", "look at -o nice: users may only make it larger"),
    ("invalid job comment", "look at -o comment"),
    # Transport and daemons.
    ("batch jobs are accepted", "the partition takes batch jobs only: hpcjobs submit, not a session"),
    ("only batch", "the partition takes batch jobs only: hpcjobs submit, not a session"),
    ("pathname of a file", "a shorter path, name or environment: run_root of the site file, --name"),
    (
        "i/o error writing script",
        (
            "the controller cannot store the job now (its disk may be full): tell the administrators, and submit "
            "again later"
        ),
    ),
    ("script is empty", "the script has not arrived: submit again"),
    ("invalid container", "look at the container's image and the site's containers section"),
    ("unable to create job record", "the queue of the cluster is full (MaxJobCount): submit again later"),
    ("slurm temporarily unable to accept job", "the cluster's queue is full: submit again later"),
    ("scheduling attempts deferred", "the controller is busy: submit again later"),
    ("error generating job credential", "the cluster's keys or clocks disagree: tell the administrators"),
    ("invalid authentication credential", "this machine's munge and the cluster's disagree: tell the administrators"),
    (
        "protocol authentication error",
        "this machine's munge and the cluster's disagree, or do not run: tell the administrators",
    ),
    ("incompatible versions", "Slurm's commands here are not of the cluster's version: load the right module"),
    ("job submit/allocate specification", "look at the options above, and at the site file's directives"),
    (
        "unspecified error",
        "a plugin of the site refuses (job_submit): its reason is above, or its administrators say why",
    ),
    ("internal error", "tell the administrators, with this message"),
    ("configuration source", "no Slurm configuration here: set SLURM_CONF, or run on a login node"),
)
"""Part of Slurm's message in lower case, and a hint; the first match counts."""


def hint_for(answer: str) -> str | None:
    """Hint for the refusal in ``answer``; None: not a refusal of Slurm itself."""
    lowered = answer.lower()
    return next((hint for arguments, hint in HINTS if arguments in lowered), None)
