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
    Association,
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
    is_name,
    is_slurm_name,
)
from hpcjobs.discovery.slurm_config import TOPICS, modules_of
from hpcjobs.errors import ConfigError, RequestError, nearest, reason_of
from hpcjobs.files import config_dir, write_beside
from hpcjobs.site.models import Site
from hpcjobs.site.schema import FILE_NAME, schema_text
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
        questions=list_questions(cluster, answers, python=sys.executable),
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


def _cluster_entries(cluster: ClusterFacts) -> list[ProposedEntry]:
    config = cluster.config
    nodes = sum(node.size for node in cluster.nodes)
    size = format_count(nodes, "node")
    entries = [ProposedEntry("description", f"Slurm {config.version or ''}, {size}".replace(" ,", ","), "")]
    if choosing := [plugin for plugin in config.submit_plugins if plugin not in _NEVER_CHOOSE]:
        origin = f"scontrol show config: JobSubmitPlugins = {','.join(choosing)}"
        entries.append(ProposedEntry("chooses_partition", True, origin))
    if config.cluster is not None:
        entries.append(ProposedEntry("cluster", config.cluster, "scontrol show config: ClusterName"))
    if cluster.slurm_conf is not None:
        entries.append(ProposedEntry("slurm_conf", cluster.slurm_conf, "SLURM_CONF in the environment of sites init"))
    return entries


def _account_entries(cluster: ClusterFacts, identity: UserIdentity, answers: Answers, time: str) -> list[ProposedEntry]:
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
    entries = [ProposedEntry("defaults", defaults, "; ".join(origin))]
    qos = _own_qos(cluster, identity)
    if qos and all(is_slurm_name(one.name) for one in qos):
        limits = {one.name: one.max_wall or "" for one in qos}
        entries.append(ProposedEntry("qos", limits, "sacctmgr show associations, show qos: MaxWall"))
        if identity.default_qos in limits and answers.qos is None:
            entries.append(ProposedEntry("default_qos", identity.default_qos, "sacctmgr show associations: DefaultQOS"))
    own = [a for a in identity.associations or () if a.account == identity.account]
    if limits_of_jobs := _submit_limits(own, _qos_named(cluster, identity.default_qos)):
        entries.append(
            ProposedEntry("max_submit_jobs", min(limits_of_jobs), "sacctmgr: MaxSubmitJobs of account or QOS")
        )
    return entries


def _own_qos(cluster: ClusterFacts, identity: UserIdentity) -> list[Qos]:
    """The QOS that the user may name, with their limits; none where Slurm does not enforce QOS."""
    if "qos" not in cluster.config.enforces:
        return []
    own = {name for association in identity.associations or () for name in association.qos}
    return [qos for qos in cluster.accounting.qos or () if qos.name in own]


def _submit_limits(associations: list[Association], qos: Qos | None) -> list[int]:
    limits = [association.max_submit_jobs for association in associations]
    limits += [qos.max_submit_jobs] if qos is not None else []
    return [limit for limit in limits if limit]


def _request_entries(
    cluster: ClusterFacts, partitions: tuple[PartitionEntry, ...], answers: Answers
) -> list[ProposedEntry]:
    entries = []
    if any(node.gpus for node in cluster.nodes) and cluster.config.select_type is not None:
        modern = cluster.config.select_type == "select/cons_tres"
        value = "gpus-per-node" if modern else "gres"
        entries.append(
            ProposedEntry("gpu_request", value, f"scontrol show config: SelectType = {cluster.config.select_type}")
        )
    if cluster.licenses and all(name.isprintable() for name, _ in cluster.licenses):
        entries.append(ProposedEntry("licenses", dict(cluster.licenses), "scontrol show licenses"))
    default, types = cluster.config.mpi_default, cluster.mpi_types or ()
    if answers.mpi is not None:
        entries.append(ProposedEntry("mpi", answers.mpi, "--mpi"))
    elif default in (None, "none") and (offered := [mpi for mpi in ("pmix", "cray_shasta", "pmi2") if mpi in types]):
        origin = f"srun --mpi=list: {', '.join(types)}; scontrol show config: MpiDefault = {default}"
        entries.append(ProposedEntry("mpi", offered[0], origin))
    if not _is_one_host(cluster):
        entries.append(ProposedEntry("node_local", list(_NODE_LOCAL), "chosen: folders that each node has for itself"))
    return entries


def _is_one_host(cluster: ClusterFacts) -> bool:
    """Whether all jobs run on this host and see its folders."""
    own = {cluster.host, cluster.host.partition(".")[0]}
    return all(node.size == 1 and {*node.names} <= own for node in cluster.nodes)


def _answered_entries(answers: Answers) -> list[ProposedEntry]:
    environment = {key: value for key in ("conda", "venv") if (value := getattr(answers, key)) is not None}
    values: list[tuple[str, object, str]] = [
        ("interface", answers.interface, "--interface"),
        ("modules", list(answers.modules) or None, "--module"),
        ("environment", environment or None, "--conda, --venv"),
        ("scratch", answers.scratch, "--scratch"),
        ("run_root", answers.run_root, "--run-root"),
        ("login", answers.login, "--login"),
    ]
    return [ProposedEntry(key, value, origin) for key, value, origin in values if value is not None]


def _software_entries(cluster: ClusterFacts, answers: Answers) -> list[ProposedEntry]:
    entries = []
    if answers.module_init is not None:
        entries.append(ProposedEntry("module_init", answers.module_init, "--module-init"))
    elif cluster.modules is not None and cluster.modules.init is not None:
        entries.append(
            ProposedEntry("module_init", cluster.modules.init, f"{cluster.modules.system} of a login shell here")
        )
    if answers.container_runtime is not None:
        entries.append(ProposedEntry("containers", {"runtime": answers.container_runtime}, "--container-runtime"))
    elif cluster.runtimes:
        first = cluster.runtimes[0]
        entries.append(ProposedEntry("containers", {"runtime": first.name}, first.origin))
    return entries


def _notes(cluster: ClusterFacts) -> list[str]:
    config = cluster.config
    notes = []
    if cluster.nodes_are_hidden:
        notes.append(
            "scontrol show node is refused (PrivateData=nodes): each node has the mean of its partition's TotalCPUs "
            "and TRES. Where nodes differ, write their shapes; GPUs may have a model, and nodes features."
        )
    if config.max_array_size is not None:
        notes.append(
            f"scontrol show config: MaxArraySize = {config.max_array_size}; sweeps keep below it by themselves."
        )
    if config.job_requeue is not None:
        effect = "jobs may be requeued" if config.job_requeue else "jobs are requeued only where --requeue is allowed"
        notes.append(f"scontrol show config: JobRequeue = {int(config.job_requeue)}: {effect}.")
    if cluster.accounting.sacct_answers:
        notes.append("sacct answers.")
    else:
        notes.append("sacct does not answer here: the states of ended jobs come from scontrol and the run folders.")
    if config.mpi_default not in (None, "none"):
        notes.append(f"scontrol show config: MpiDefault = {config.mpi_default}; other types: `srun --mpi=list`.")
    if cluster.modules is not None:
        for topic in TOPICS:
            names = modules_of(topic, cluster.modules.names)
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            if names:
                notes.append(f"module avail, {topic}: {', '.join(names[:_MOST_NAMES])}{more}.")
    return notes


def list_questions(cluster: ClusterFacts, answers: Answers, *, python: str) -> tuple[Question, ...]:
    """The questions that neither the cluster nor the user has answered; ``python`` runs hpcjobs here."""
    questions = []
    if answers.interface is None:
        questions.append(
            Question("interface", "Which network interface of a node is the fast one?",
                     "srun -N1 -t 1 ip -brief address", "--interface NAME")
        )  # fmt: skip
    if not answers.modules and cluster.modules is not None:
        mpi = modules_of("MPI", cluster.modules.names)
        known = f" (MPI here: {', '.join(mpi[:3])})" if mpi else ""
        questions.append(
            Question("modules", f"Which modules does a program need{known}?", "module avail", "--module NAME")
        )
    if answers.conda is None and answers.venv is None:
        questions.append(
            Question("environment", "Do the nodes have the Python that runs hpcjobs here? If not: a conda environment "
                     "or venv that they have.", f"srun -N1 -t 1 {shlex.quote(python)} -c 'import hpcjobs'",
                     "--conda NAME or --venv FOLDER")
        )  # fmt: skip
    if answers.scratch is None:
        tmp_fs = f" Slurm's TmpFS is {cluster.config.tmp_fs}." if cluster.config.tmp_fs is not None else ""
        questions.append(
            Question("scratch", f"Where is the scratch of a node for a job?{tmp_fs}",
                     "srun -N1 -t 1 sh -c 'echo $TMPDIR; df -h /tmp /scratch /local'", "--scratch FOLDER")
        )  # fmt: skip
    if answers.run_root is None:
        questions.append(
            Question("run_root", "Which folder do all nodes see that is fast and large? Without it, runs/ in the "
                     "current folder.", "df -h ~ \"${SCRATCH-}\" \"${WORK-}\"", "--run-root FOLDER")
        )  # fmt: skip
    questions += _accounting_questions(cluster, answers)
    if answers.container_runtime is None and not cluster.runtimes:
        questions.append(
            Question("containers", "Do the nodes have a container runtime?",
                     "srun -N1 -t 1 sh -c 'command -v apptainer singularity enroot'", "--container-runtime NAME")
        )  # fmt: skip
    if answers.login is None:
        questions.append(
            Question("login", "By which name do you reach this login node from outside?", "hostname --fqdn",
                     "--login HOST")
        )  # fmt: skip
    return tuple(questions)


def _accounting_questions(cluster: ClusterFacts, answers: Answers) -> list[Question]:
    questions = []
    if answers.mpi is None and cluster.mpi_types is None:
        questions.append(Question("mpi", "Which MPI type does srun have?", "srun --mpi=list", "--mpi TYPE"))
    if not cluster.accounting.associations and answers.account is None and cluster.config.enforces:
        command = "sacctmgr show associations user=$USER format=account,qos,defaultqos"
        questions.append(
            Question("defaults.account", "Which account and QOS do your jobs need? sacctmgr did not show them.",
                     command, "--account NAME, --qos NAME")
        )  # fmt: skip
    return questions


def default_name(cluster: ClusterFacts) -> str:
    """ClusterName, in characters that the name of a site can have.

    Raises RequestError: the cluster has no name.
    """
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
    """The site file; ``made`` says when and where.

    Raises RequestError: an answer is not a value of its key.
    """
    text = "\n".join(_lines(draft, made)) + "\n"
    check_text(text)
    return text


def check_text(text: str) -> None:
    """Refuse an invalid site file (RequestError)."""
    try:
        msgspec.convert(yaml.safe_load(text), Site)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise RequestError(
            f"the site file would not be valid: {error}",
            hint="is a value of one of the flags wrong? nothing is written",
        ) from error


def _lines(draft: ProposedSite, made: str) -> Iterator[str]:
    yield f"# yaml-language-server: $schema={FILE_NAME}"
    yield from _comment(f"Site {draft.name}: {made}. The comment before a key names the origin of its value.")
    for entry in draft.entries:
        if entry.origin:
            yield ""
            yield from _comment(entry.origin)
        yield f"{entry.key}: {_flow(entry.value)}"
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
    yield f"  {_flow(partition.name)}:"
    for key, value in partition.entries:
        if key == "nodes" and isinstance(value, list):
            yield "    nodes:"
            yield from (f"      - {_flow(group)}" for group in value)
        else:
            yield f"    {key}: {_flow(value)}"


def _flow(value: object) -> str:
    """``value`` in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()


def _comment(text: str, *, indent: str = "") -> list[str]:
    """``text`` as comment lines; text of the cluster cannot end the comment."""
    clean = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    continued = f"{indent}#   " if clean.startswith("- ") else f"{indent}# "
    wrap = textwrap.TextWrapper(_WIDTH, initial_indent=f"{indent}# ", subsequent_indent=continued)
    wrap.break_long_words = wrap.break_on_hyphens = False
    return wrap.wrap(clean)
