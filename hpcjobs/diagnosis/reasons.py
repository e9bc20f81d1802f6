"""Slurm's reasons why a job waits, with explanations and fixes."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """Explanation of a reason. ``may_move``: another partition, time limit or size may start sooner."""

    text: str
    fix: str | None = None
    may_move: bool = False


_LIMITS = "sacctmgr show qos ; sacctmgr show associations user=$USER  # the limits; end or shrink some of your jobs"
_ADMINISTRATORS = "ask the administrators, with this reason"

REASONS: dict[str, Reason] = {
    "None": Reason("It was submitted a moment ago; Slurm has not looked at it yet"),
    "Resources": Reason("It is next, and waits until enough nodes are free", may_move=True),
    "Priority": Reason("Jobs with a higher priority wait before it", may_move=True),
    "Dependency": Reason("It waits for other jobs to end"),
    "DependencyNeverSatisfied": Reason(
        "A job that it depends on ended in another way than the dependency demands: it can never start",
        "hpcjobs cancel {job} && hpcjobs rerun {job}  # rerun leaves the dependency out",
    ),
    "BeginTime": Reason("It may not start before its begin time", "scontrol update JobId={job} StartTime=now"),
    "JobHeldUser": Reason("It is held by its user", "scontrol release {job}"),
    "JobHeldAdmin": Reason("It is held by an administrator", _ADMINISTRATORS),
    "JobHoldMaxRequeue": Reason("It was requeued too often and is held", "scontrol release {job}"),
    "launch failed requeued held": Reason("Its start failed on a node and it is held", "scontrol release {job}"),
    "Licenses": Reason("It waits for a license", "scontrol show licenses"),
    "Reservation": Reason("It waits for its reservation", "scontrol show reservation"),
    "ReservationDeleted": Reason("Its reservation no longer exists", "scontrol update JobId={job} ReservationName="),
    "ReqNodeNotAvail": Reason(
        "Nodes that it needs are down, drained or reserved", "sinfo -R  # says why", may_move=True
    ),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": Reason(
        "Nodes that it needs are down, drained, or reserved for other partitions", "sinfo -R  # says why", may_move=True
    ),
    "ReqNodeNotAvail, Reserved for maintenance": Reason(
        "Its time limit reaches into a maintenance: the nodes are reserved for it",
        "scontrol update JobId={job} TimeLimit=SHORTER  # to end before what scontrol show reservation lists",
        may_move=True,
    ),
    "NodeDown": Reason("A node that it needs is down", "sinfo -R  # says why", may_move=True),
    "BadConstraints": Reason("No node can ever meet its request", "scontrol show job {job}  # and sinfo -N -l"),
    "PartitionDown": Reason("The partition does not start jobs now", "sinfo -s", may_move=True),
    "PartitionInactive": Reason("The partition is switched off", "sinfo -s", may_move=True),
    "PartitionNodeLimit": Reason(
        "It wants more nodes than the partition allows, or than are up", "scontrol show partition", may_move=True
    ),
    "PartitionTimeLimit": Reason(
        "Its time limit is longer than the partition allows", "scontrol show partition", may_move=True
    ),
    "PartitionConfig": Reason("It does not fit the partition's limits", "scontrol show partition", may_move=True),
    "AccountNotAllowed": Reason("Its account may not use the partition", "sacctmgr show associations user=$USER"),
    "QOSNotAllowed": Reason("Its QOS may not be used in the partition", "sacctmgr show associations user=$USER"),
    "InvalidAccount": Reason("Its account is not valid", "sacctmgr show associations user=$USER"),
    "InvalidQOS": Reason("Its QOS is not valid", "sacctmgr show associations user=$USER"),
    "JobArrayTaskLimit": Reason(
        "As many tasks of the array run as its own limit (%N) allows", "scontrol update JobId={job} ArrayTaskThrottle=N"
    ),
    "Prolog": Reason("The nodes are being prepared: their prolog runs"),
    "Cleaning": Reason("An earlier start of the job is being cleaned up"),
    "NonZeroExitCode": Reason("Its earlier start failed, and it is held", "scontrol release {job}"),
    "BurstBufferResources": Reason("It waits for space in a burst buffer", "scontrol show burst"),
    "FedJobLock": Reason("It waits for the clusters of the federation"),
    "MaxJobsPerAccount": Reason("The account has as many jobs as it may", _LIMITS),
    "SystemFailure": Reason("Slurm, a file system or the network failed", _ADMINISTRATORS),
}
"""Slurm's name of a reason -> explanation; the text after the first comma or bracket is about nodes."""

_PREFIXES: tuple[tuple[str, Reason], ...] = (
    ("QOSMax", Reason("A limit of the QOS for one job or one user is reached", _LIMITS)),
    ("QOSGrp", Reason("The jobs of all users of the QOS together reach its limit", _LIMITS)),
    ("QOSMin", Reason("The job is smaller than its QOS demands", _LIMITS)),
    ("QOSUsageThreshold", Reason("The account has used up its share for this QOS", _LIMITS)),
    ("QOS", Reason("A limit of the QOS is reached", _LIMITS)),
    ("AssocGrp", Reason("The jobs of the account together reach its limit", _LIMITS)),
    ("AssocMax", Reason("A limit of the account for one job or one user is reached", _LIMITS)),
    ("Assoc", Reason("A limit of the account is reached", _LIMITS)),
    ("ReqNodeNotAvail", REASONS["ReqNodeNotAvail"]),
    ("launch failed", REASONS["launch failed requeued held"]),
)


def split_reasons(code: str | None) -> list[str]:
    """The reasons in ``code``: squeue lists tasks of an array that wait in one row, with a comma between theirs."""
    names: list[str] = []
    for part in (code or "None").strip("()").replace("_", " ").split(","):  # scontrol joins the words of a reason
        if names and _find(part.strip()) is None:  # about nodes
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return names


def explain_reason(code: str | None) -> Reason:
    """Explain Slurm's reason, or each where there are several; an unknown one is explained by its name."""
    first, *others = [_explain(name) for name in split_reasons(code)]
    if not others:
        return first
    texts = "; ".join(reason.text for reason in (first, *others))
    may_move = any(reason.may_move for reason in (first, *others))
    return Reason(f"Its tasks differ. {texts}", "scontrol show job {job}  # has the reason of each task", may_move)


def _find(name: str) -> Reason | None:
    if name in REASONS:
        return REASONS[name]
    return next((reason for prefix, reason in _PREFIXES if name.startswith(prefix)), None)


def _explain(name: str) -> Reason:
    reason = REASONS.get(name) or _find(name.split(",")[0])
    return reason or Reason(f"Slurm's reason is {name}", "man squeue  # lists the reasons under JOB REASON CODES")
