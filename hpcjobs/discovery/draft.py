"""Drafts a site file from the cluster's facts and the user's answers. Pure."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from hpcjobs.discovery.partitions import (
    Answers,
    ClusterFacts,
    Omission,
    PartitionEntry,
    PartitionInfo,
    ProposedEntry,
    ProposedSite,
    Qos,
    Question,
    UserIdentity,
    describe_partitions,
)
from hpcjobs.discovery.slurm_config import TOPICS, modules_of
from hpcjobs.errors import ConfigError, RequestError, nearest, reason_of
from hpcjobs.files import config_dir, write_beside
from hpcjobs.site.checks import check_slurm_name, is_name
from hpcjobs.site.models import Site
from hpcjobs.site.schema import FILE_NAME, schema_text
from hpcjobs.site.yaml_file import write_flow
from hpcjobs.units import format_count, time_limit, time_limit_s

_NEVER_CHOOSE = ("require_timelimit", "throttle", "pbs", "cray", "cray_aries", "logging")
"""Plugins of Slurm that do not change a job's partition; the effect of a script (lua) is unknown."""
_TIME = "1h"
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
_MOST_NAMES = 12


def draft_site(name: str, cluster: ClusterFacts, answers: Answers) -> ProposedSite:
    """The draft of the site file ``name``.

    Raises RequestError: a flag names a partition or account that the user cannot use, ``--time`` is invalid, or no
    partition takes the user's jobs.
    """
    if answers.time is not None:
        try:
            time_limit(answers.time)
        except ValueError as error:
            raise RequestError(f"--time: {error}") from error
    identity = _identity(cluster, answers)
    time = answers.time or _default_time(cluster, identity)
    partitions, omissions = describe_partitions(cluster, identity, time=time)
    if not partitions:
        raise RequestError(
            "no partition of this cluster takes your jobs: "
            + "; ".join(f"{o.partition}: {o.reason}" for o in omissions)
            if omissions
            else "scontrol shows no partition",
            hint="`scontrol --all show partition` prints them; ask those who run the cluster for access",
        )
    partitions = _mark_default(partitions, _default_partition(cluster, partitions, omissions, answers))
    entries = (
        *_cluster_entries(cluster),
        *_account_entries(cluster, identity, answers, time),
        *_request_entries(cluster, partitions, answers),
        *_answered_entries(answers),
        *_software_entries(cluster, answers),
    )
    return ProposedSite(
        name=name,
        entries=entries,
        partitions=partitions,
        omissions=omissions,
        notes=tuple(_notes(cluster)),
        questions=tuple(_list_questions(cluster, answers)),
    )


def _identity(cluster: ClusterFacts, answers: Answers) -> UserIdentity:
    accounting = cluster.accounting
    associations = accounting.associations
    known = [] if associations is None else list(dict.fromkeys(a.account for a in associations))
    if answers.account is not None and known and answers.account not in known:
        raise RequestError(
            f"--account {answers.account!r}: sacctmgr shows no such account of yours; {nearest(answers.account, known)}"
        )
    account = answers.account or accounting.default_account or (known[0] if known else None)
    own = [a for a in associations or () if a.account == account]
    default_qos = answers.qos or next((a.default_qos for a in own if a.default_qos), None)
    return UserIdentity(account, default_qos, associations or None)


def _default_time(cluster: ClusterFacts, identity: UserIdentity) -> str:
    """An hour, or the limit of the default QOS if that is less."""
    qos = _qos_named(cluster, identity.default_qos)
    limit = time_limit_s(qos.max_wall) if qos is not None and qos.max_wall is not None else None
    return qos.max_wall if qos is not None and qos.max_wall and limit is not None and limit < 3600 else _TIME


def _qos_named(cluster: ClusterFacts, name: str | None) -> Qos | None:
    return next((qos for qos in cluster.accounting.qos or () if qos.name == name), None)


def _default_partition(
    cluster: ClusterFacts, partitions: tuple[PartitionEntry, ...], omissions: tuple[Omission, ...], answers: Answers
) -> str:
    names = [partition.name for partition in partitions]
    if answers.partition is not None:
        reason = next((o.reason for o in omissions if o.partition == answers.partition), None)
        if reason is not None:
            raise RequestError(f"--partition {answers.partition}: your jobs cannot use it: {reason}")
        if answers.partition not in names:
            raise RequestError(f"--partition {answers.partition!r}: {nearest(answers.partition, names)}")
        return answers.partition
    usable = [partition for partition in cluster.partitions if partition.name in names]
    starting = [partition for partition in usable if _starts_jobs(partition, cluster)] or usable
    return next((partition.name for partition in starting if partition.default), starting[0].name)


def _starts_jobs(partition: PartitionInfo, cluster: ClusterFacts) -> bool:
    """Whether jobs start there now: it is up, and has a node that is."""
    return partition.state in (None, "UP") and any(
        partition.name in node.partitions and not node.unavailable for node in cluster.nodes
    )


def _mark_default(partitions: tuple[PartitionEntry, ...], default: str) -> tuple[PartitionEntry, ...]:
    return tuple(
        p._replace(entries=(("default", True), *p.entries)) if p.name == default else p
        for p in sorted(partitions, key=lambda p: p.name != default)
    )


def _cluster_entries(cluster: ClusterFacts) -> Iterator[ProposedEntry]:
    config = cluster.config
    size = format_count(sum(node.size for node in cluster.nodes), "node")
    yield ProposedEntry("description", f"Slurm {config.version or ''}, {size}".replace(" ,", ","), "")
    if choosing := [plugin for plugin in config.submit_plugins if plugin not in _NEVER_CHOOSE]:
        origin = f"scontrol show config: JobSubmitPlugins = {','.join(choosing)}"
        yield ProposedEntry("chooses_partition", True, origin)
    if config.cluster is not None:
        yield ProposedEntry("cluster", config.cluster, "scontrol show config: ClusterName")
    if cluster.slurm_conf is not None:
        yield ProposedEntry("slurm_conf", cluster.slurm_conf, "SLURM_CONF in the environment of sites init")


def _account_entries(
    cluster: ClusterFacts, identity: UserIdentity, answers: Answers, time: str
) -> Iterator[ProposedEntry]:
    defaults: dict[str, object] = {"time": time}
    origin = ["time: --time" if answers.time else "time: chosen, for jobs that name none"]
    if answers.account is not None:
        defaults["account"] = answers.account
        origin.append("account: --account")
    elif identity.account is not None and cluster.accounting.default_account is None:
        defaults["account"] = identity.account
        others = ", ".join(name for name in identity.accounts or () if name != identity.account)
        origin.append("account: sacctmgr shows no default account" + (f"; you also have {others}" if others else ""))
    if answers.qos is not None:
        defaults["qos"] = answers.qos
        origin.append("qos: --qos")
    yield ProposedEntry("defaults", defaults, "; ".join(origin))
    qos = _own_qos(cluster, identity)
    if qos and all(is_name(one.name, check_slurm_name) for one in qos):
        limits = {one.name: one.max_wall or "" for one in qos}
        yield ProposedEntry("qos", limits, "sacctmgr show associations, show qos: MaxWall")
        if identity.default_qos in limits and answers.qos is None:
            yield ProposedEntry("default_qos", identity.default_qos, "sacctmgr show associations: DefaultQOS")
    own = [a.max_submit_jobs for a in identity.associations or () if a.account == identity.account]
    default = _qos_named(cluster, identity.default_qos)
    if limits_of_jobs := [limit for limit in (*own, default and default.max_submit_jobs) if limit]:
        yield ProposedEntry("max_submit_jobs", min(limits_of_jobs), "sacctmgr: MaxSubmitJobs of account or QOS")


def _own_qos(cluster: ClusterFacts, identity: UserIdentity) -> list[Qos]:
    """The QOS that the user may name, with their limits; none where Slurm does not enforce QOS."""
    if "qos" not in cluster.config.enforces:
        return []
    own = {name for association in identity.associations or () for name in association.qos}
    return [qos for qos in cluster.accounting.qos or () if qos.name in own]


def _request_entries(
    cluster: ClusterFacts, partitions: tuple[PartitionEntry, ...], answers: Answers
) -> Iterator[ProposedEntry]:
    if any(node.gpus for node in cluster.nodes) and (select := cluster.config.select_type) is not None:
        value = "gpus-per-node" if select == "select/cons_tres" else "gres"
        yield ProposedEntry("gpu_request", value, f"scontrol show config: SelectType = {select}")
    if cluster.licenses and all(name.isprintable() for name, _ in cluster.licenses):
        yield ProposedEntry("licenses", dict(cluster.licenses), "scontrol show licenses")
    default, types = cluster.config.mpi_default, cluster.mpi_types or ()
    if answers.mpi is not None:
        yield ProposedEntry("mpi", answers.mpi, "--mpi")
    elif default in (None, "none") and (offered := [mpi for mpi in ("pmix", "cray_shasta", "pmi2") if mpi in types]):
        origin = f"srun --mpi=list: {', '.join(types)}; scontrol show config: MpiDefault = {default}"
        yield ProposedEntry("mpi", offered[0], origin)
    if not _is_one_host(cluster):
        yield ProposedEntry("node_local", _NODE_LOCAL, "chosen: folders that each node has for itself")


def _is_one_host(cluster: ClusterFacts) -> bool:
    """Whether all jobs run on this host and see its folders."""
    own = {cluster.host, cluster.host.partition(".")[0]}
    return all(node.size == 1 and {*node.names} <= own for node in cluster.nodes)


def _answered_entries(answers: Answers) -> list[ProposedEntry]:
    environment = {key: value for key in ("conda", "venv") if (value := getattr(answers, key)) is not None}
    values: list[tuple[str, object, str]] = [
        ("interface", answers.interface, "--interface"),
        ("modules", answers.modules or None, "--module"),
        ("environment", environment or None, "--conda, --venv"),
        ("scratch", answers.scratch, "--scratch"),
        ("run_root", answers.run_root, "--run-root"),
        ("login", answers.login, "--login"),
    ]
    return [ProposedEntry(key, value, origin) for key, value, origin in values if value is not None]


def _software_entries(cluster: ClusterFacts, answers: Answers) -> Iterator[ProposedEntry]:
    modules = cluster.modules
    if answers.module_init is not None:
        yield ProposedEntry("module_init", answers.module_init, "--module-init")
    elif modules is not None and modules.init is not None:
        yield ProposedEntry("module_init", modules.init, f"{modules.system} of a login shell here")
    if answers.container_runtime is not None:
        yield ProposedEntry("containers", {"runtime": answers.container_runtime}, "--container-runtime")
    elif cluster.runtimes:
        first = cluster.runtimes[0]
        yield ProposedEntry("containers", {"runtime": first.name}, first.origin)


def _notes(cluster: ClusterFacts) -> Iterator[str]:
    config = cluster.config
    if cluster.nodes_are_hidden:
        yield (
            "scontrol show node is refused (PrivateData=nodes): each node has the mean of its partition's TotalCPUs "
            "and TRES. Where nodes differ, write their shapes; GPUs may have a model, and nodes features."
        )
    if config.max_array_size is not None:
        yield f"scontrol show config: MaxArraySize = {config.max_array_size}; sweeps keep below it by themselves."
    if config.job_requeue is not None:
        effect = "jobs may be requeued" if config.job_requeue else "jobs are requeued only where --requeue is allowed"
        yield f"scontrol show config: JobRequeue = {int(config.job_requeue)}: {effect}."
    if cluster.accounting.sacct_answers:
        yield "sacct answers."
    else:
        yield "sacct does not answer here: the states of ended jobs come from scontrol and the run folders."
    if config.mpi_default not in (None, "none"):
        yield f"scontrol show config: MpiDefault = {config.mpi_default}; other types: `srun --mpi=list`."
    if cluster.modules is not None:
        for topic in TOPICS:
            names = modules_of(topic, cluster.modules.names)
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            if names:
                yield f"module avail, {topic}: {', '.join(names[:_MOST_NAMES])}{more}."


def _list_questions(cluster: ClusterFacts, answers: Answers) -> Iterator[Question]:
    """The questions that neither the cluster nor the user has answered."""
    if answers.interface is None:
        text = "Which network interface of a node is the fast one?"
        yield Question("interface", text, "srun -N1 -t 1 ip -brief address", "--interface NAME")
    if not answers.modules and cluster.modules is not None:
        mpi = modules_of("MPI", cluster.modules.names)
        known = f" (MPI here: {', '.join(mpi[:3])})" if mpi else ""
        yield Question("modules", f"Which modules does a program need{known}?", "module avail", "--module NAME")
    if answers.conda is None and answers.venv is None:
        text = (
            "Do the nodes have the Python that runs hpcjobs here? If not: a conda environment or venv that they have."
        )
        command = f"srun -N1 -t 1 {shlex.quote(sys.executable)} -c 'import hpcjobs'"
        yield Question("environment", text, command, "--conda NAME or --venv FOLDER")
    if answers.scratch is None:
        tmp_fs = f" Slurm's TmpFS is {cluster.config.tmp_fs}." if cluster.config.tmp_fs is not None else ""
        command = "srun -N1 -t 1 sh -c 'echo $TMPDIR; df -h /tmp /scratch /local'"
        yield Question("scratch", f"Where is the scratch of a node for a job?{tmp_fs}", command, "--scratch FOLDER")
    if answers.run_root is None:
        text = "Which folder do all nodes see that is fast and large? Without it, runs/ in the current folder."
        yield Question("run_root", text, 'df -h ~ "${SCRATCH-}" "${WORK-}"', "--run-root FOLDER")
    if answers.mpi is None and cluster.mpi_types is None:
        yield Question("mpi", "Which MPI type does srun have?", "srun --mpi=list", "--mpi TYPE")
    if not cluster.accounting.associations and answers.account is None and cluster.config.enforces:
        text = "Which account and QOS do your jobs need? sacctmgr did not show them."
        command = "sacctmgr show associations user=$USER format=account,qos,defaultqos"
        yield Question("defaults.account", text, command, "--account NAME, --qos NAME")
    if answers.container_runtime is None and not cluster.runtimes:
        command = "srun -N1 -t 1 sh -c 'command -v apptainer singularity enroot'"
        yield Question("containers", "Do the nodes have a container runtime?", command, "--container-runtime NAME")
    if answers.login is None:
        text = "By which name do you reach this login node from outside?"
        yield Question("login", text, "hostname --fqdn", "--login HOST")


def default_name(cluster: ClusterFacts) -> str:
    """ClusterName, in characters that the name of a site can have. Raises RequestError: the cluster has no name."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", cluster.config.cluster or "")
    if not is_name(name):
        raise RequestError(
            f"ClusterName of scontrol show config is {cluster.config.cluster!r}, which cannot be the name of a site",
            hint="use hpcjobs sites init NAME",
        )
    return name


def choose_path(name: str | None, file: Path | None, *, force: bool) -> Path:
    """The file to write: ``file``, or ``NAME.yaml`` among the user's site files.

    Raises RequestError: neither can be the name of a site, or the file exists and ``force`` is not given.
    """
    path = (config_dir() / "site_configs" / f"{name}.yaml") if file is None else file.expanduser().absolute()
    if file is not None and path.suffix != ".yaml":
        raise RequestError(f"--file {file}: a site file is called NAME.yaml")
    called = path.stem if name is None else name
    if not is_name(called):
        raise RequestError(
            f"site name {called!r}: use letters, digits, '_', '.', '-', and start with a letter or digit"
        )
    if file is not None and path.stem != called:
        raise RequestError(
            f"site {name!r} and --file {file}: the name of the file is the site's name", hint=f"--file {name}.yaml"
        )
    _refuse_existing(path, force=force)
    return path


def save_text(path: Path, text: str, *, force: bool) -> None:
    """Write the file atomically, and the schema for editors that its first line names.

    Raises RequestError: it exists and ``force`` is not given. ConfigError: it cannot be written.
    """
    _refuse_existing(path, force=force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_beside(path.parent / FILE_NAME, schema_text(), mode=None)
        write_beside(path, text, mode=None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {reason_of(error)}") from error


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise RequestError(f"{path} is a folder")
    if os.path.lexists(path) and not force:
        raise RequestError(
            f"{path} exists", hint="--force replaces it, --dry-run prints the new file, NAME chooses another"
        )


_WIDTH = 116
_PARTITIONS_ORIGIN = (
    "scontrol show partition, scontrol show node: CPUEfctv, RealMemory less MemSpecLimit, Gres, features"
)


def write_text(draft: ProposedSite, *, made: str) -> str:
    """The site file; ``made`` says when and where. Raises RequestError: an answer is not a value of its key."""
    text = "\n".join(_lines(draft, made)) + "\n"
    try:
        msgspec.convert(yaml.safe_load(text), Site)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise RequestError(
            f"the site file would not be valid: {error}",
            hint="is a value of one of the flags wrong? nothing is written",
        ) from error
    return text


def _lines(draft: ProposedSite, made: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={FILE_NAME}"
    yield from _comment(f"Site {draft.name}: {made}. The comment before a key names the origin of its value.")
    for entry in draft.entries:
        if entry.origin:
            yield ""
            yield from _comment(entry.origin)
        yield f"{entry.key}: {write_flow(entry.value)}"
    yield ""
    yield from _comment(_PARTITIONS_ORIGIN)
    yield "partitions:"
    for partition in draft.partitions:
        yield from _partition_lines(partition)
    if draft.omissions:
        yield ""
        yield from _comment("Partitions that are left out, because your jobs cannot use them:")
        for omission in draft.omissions:
            yield from _comment(f"- {omission.partition}: {omission.reason}")
    if draft.notes:
        yield ""
        yield from _comment("Facts that need no key:")
        for note in draft.notes:
            yield from _comment(f"- {note}")
    if draft.questions:
        yield ""
        yield from _comment("What could not be learnt here: question, command that answers it, flag of `sites init`.")
        for question in draft.questions:
            yield from _comment(f"- {question.key}: {question.text}")
            yield f"#     {question.command}"
            yield f"#     {question.flag}"


def _partition_lines(partition: PartitionEntry) -> Iterator[str]:
    for note in partition.notes:
        yield from _comment(note, indent="  ")
    yield f"  {write_flow(partition.name)}:"
    for key, value in partition.entries:
        if key == "nodes" and isinstance(value, list):
            yield "    nodes:"
            yield from (f"      - {write_flow(group)}" for group in value)
        else:
            yield f"    {key}: {write_flow(value)}"


def _comment(text: str, *, indent: str = "") -> list[str]:
    """``text`` as comment lines; text of the cluster cannot end the comment."""
    clean = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    continued = f"{indent}#   " if clean.startswith("- ") else f"{indent}# "
    wrap = textwrap.TextWrapper(_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=continued)
    wrap.break_long_words = wrap.break_on_hyphens = False
    return wrap.wrap(clean)
