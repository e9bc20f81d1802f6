"""Fault tolerance of a job, and messages about its end."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpcjobs.errors import RequestError, UnknownJobError, nearest, reason_of
from hpcjobs.fabric import verdict
from hpcjobs.files import user_name
from hpcjobs.job.layers import Values
from hpcjobs.job.models import JobSpec
from hpcjobs.processes.start import module_words
from hpcjobs.site.models import WARNING_S, Partition, Retries, Site, parse_retries
from hpcjobs.site.resources import node_range
from hpcjobs.slurm_commands import hosts_of
from hpcjobs.units import time_limit_s, walltime_s


def resolve_retries(spec: JobSpec, site: Site, values: Values) -> tuple[Retries | None, int | None]:
    """Whether the job is started again, when it gets a signal before its limit, and Slurm's options of both."""
    retries = parse_retries(spec.retries or site.retries or "off")
    signal_before = spec.signal_before or site.signal_before
    signal_before_s = None if signal_before is None else walltime_s(signal_before)
    if retries is not None:
        values.default("requeue", True, "retries")
        # B: the batch shell alone gets it, since node.pyz decides when the ranks are signalled
        # At most a quarter of the limit before its end, as node.pyz does: a signal that is due 300 s before the end of
        # a limit of 300 s would end the script before anything handles it.
        limit_s = time_limit_s(values["time"] if isinstance(values["time"], str) else None)
        warning_s = WARNING_S if limit_s is None else min(WARNING_S, max(1, int(limit_s // 4)))
        values.default("signal", f"B:USR1@{signal_before_s or warning_s}", "retries")
    return retries, signal_before_s


def preemption_messages(retries: Retries | None, partitions: Mapping[str, Partition]) -> tuple[str, ...]:
    """One for each partition that ends preempted jobs where the request has them start again."""
    if retries is None or not retries.preempt:
        return ()
    return tuple(
        f"--retries: partition {name} cancels a job whose nodes others need (PreemptMode=CANCEL): Slurm does not"
        " start it again"
        for name, partition in partitions.items()
        if partition.preemptible == "cancel"
    )


def resolve_elastic(spec: JobSpec, values: Values, *, launcher: str, retries: Retries | None) -> None:
    """Whether the job can lose nodes and continue; then Slurm needs ``--no-kill``."""
    if spec.min_nodes is None:
        return
    if launcher != "torchrun":
        raise RequestError(
            f"min_nodes={spec.min_nodes}: launcher {launcher} cannot continue with fewer nodes",
            hint="use --launcher torchrun",
        )
    if retries is None:
        raise RequestError(
            f"min_nodes={spec.min_nodes}: it needs --retries, which the job does not have", hint="add --retries on"
        )
    if spec.min_nodes >= node_range(values["nodes"])[0]:
        raise RequestError(f"min_nodes={spec.min_nodes} must be less than nodes={values['nodes']}")
    values.default("no_kill", True, "min_nodes")


def avoided_on(site: str) -> dict[str, str]:
    """The nodes to leave out now, and why, as the site's record has it."""
    return {
        node: f"{last.reason} (job {last.job_id}, {time.strftime('%F %H:%M', time.localtime(last.time))})"
        for node, (last, *_) in verdict.find_avoided(verdict.record_path(site), time.time()).items()
    }


def named_nodes(nodelist: str | None) -> set[str]:
    """The nodes that ``--nodelist`` names; none where it names a file of them, as it may (anything with a ``/``).

    Raises RequestError: not a list of hosts.
    """
    if not nodelist or "/" in nodelist:
        return set()
    try:
        return set(hosts_of(nodelist))
    except ValueError as error:
        raise RequestError(f"nodelist {nodelist!r}: {error}", hint="such as n1,n[03-05]") from error


def still_left_out(
    avoid: Mapping[str, str], *, nodes: int, nodelist: str | None, available: int | None
) -> dict[str, str]:
    """Those of ``avoid`` that the job can do without: none that it names, none if too few are ``available``."""
    named = named_nodes(nodelist)
    avoided = {node: why for node, why in avoid.items() if node not in named}
    too_few = available is not None and available - len(avoided) < nodes
    return {} if too_few else avoided


def read_standings(site: str) -> dict[str, verdict.Standing]:
    """Every node that there is a verdict on."""
    return verdict.standings(verdict.read(verdict.record_path(site)), time.time())


def clear_verdicts(site: str, nodes: Iterable[str]) -> None:
    """Remove the verdicts on ``nodes``. Raises UnknownJobError: a node has no verdict; then all verdicts stay."""
    requested, known = list(nodes), read_standings(site)
    for node in requested:
        if node not in known:
            raise UnknownJobError(
                f"node {node!r} has no record in {verdict.record_path(site)}", hint=nearest(node, known)
            )
    verdict.append(
        verdict.record_path(site),
        [verdict.NodeVerdict(node, verdict.CLEARED, time.time()) for node in requested],
    )


REHEARSED_TOLERANCE = "0.8"
"""The nodes of a sandbox share the cores of one machine: how fast they are next to each other says little."""


def check_words(site: Site, *, cpus_per_task: object) -> tuple[str, ...]:
    """Return facts for the check: the site's, and the devices of each task."""
    arguments = ["--record", str(verdict.record_path(site.name))]
    for flag, value in (("--interface", site.interface), ("--mpi", site.mpi), ("--suffix", site.address_suffix)):
        arguments += [flag, value] if value else []
    arguments += ["--tolerance", REHEARSED_TOLERANCE] if site.rehearsal else []
    arguments += ["--cpus-per-task", str(cpus_per_task)] if isinstance(cpus_per_task, int) else []
    return tuple(arguments)


def preflight_words(
    site: Site, *, python: str, cpus_per_task: object, nodes: int | None, launcher: str
) -> tuple[str, ...]:
    """Return the command of the check in the job's script; ``nodes``: how many of the allocation's nodes it chooses.

    mpirun takes the node that it is started on for the first of those it is to use.
    """
    chosen: tuple[str, ...] = () if nodes is None else ("--choose", str(nodes))
    chosen += ("--keep-first",) if chosen and launcher == "mpirun" else ()
    arguments = check_words(site, cpus_per_task=cpus_per_task)
    return (python, "-u", *module_words("hpcjobs.fabric.check"), "--quick", *arguments, *chosen)


MAIL_TYPES = {"end": "END", "fail": "FAIL", "requeue": "REQUEUE"}
"""Event of ``--notify-on`` -> its name in sbatch's ``--mail-type``."""
_KINDS = ("mail", "command", "webhook")
_ADDRESS = re.compile(r"https://\S+|http://(?:localhost|127\.0\.0\.1|\[::1\])[:/]\S*", re.ASCII)
_SECRET = "its address is a secret: write it to a file that only you can read, and use webhook:FILE or webhook:$NAME"


def events(spec: JobSpec) -> tuple[str, ...]:
    """The events to report; all that there are unless the request names some.

    Raises RequestError: no such event, or no way to report it.
    """
    if spec.notify_on is None:
        return tuple(MAIL_TYPES)
    named = tuple(arg for arg in spec.notify_on.split(",") if arg)
    for arg in named:
        if arg not in MAIL_TYPES:
            raise RequestError(f"--notify-on {arg}: no event", hint=nearest(arg, MAIL_TYPES))
    if not spec.notify:
        raise RequestError(
            "--notify-on: nothing says how to report it", hint="add --notify mail, command:… or webhook:…"
        )
    return named


def mail_options(spec: JobSpec, site: Site) -> dict[str, str]:
    """``mail_type`` and ``mail_user`` for Slurm, which sends the mail; empty: no mail is wanted.

    Raises RequestError: the site has no Slurm.
    """
    addresses = [arg.partition(":")[2] for arg in spec.notify if arg.partition(":")[0] == "mail"]
    if not addresses:
        return {}
    if not site.kind.takes_sbatch_options:
        raise RequestError(
            f"--notify mail: site {site.name} has no Slurm that sends it",
            hint="--notify 'command:mail -s \"$HPCJOBS_TEXT\" ME </dev/null' uses this machine's own",
        )
    types = ",".join(MAIL_TYPES[event] for event in events(spec))
    return {"mail_type": types} | ({"mail_user": addresses[-1]} if addresses[-1] else {})


def complete_address(values: Values, site: Site) -> None:
    """Have Slurm's mail go to the site's ``mail_domain`` where the job names none."""
    address = values["mail_user"]
    if site.mail_domain is None or not site.kind.takes_sbatch_options or "@" in (address or ""):
        return
    if values["mail_type"] not in (None, "NONE"):
        source = values.sources.get("mail_user", f"site {site.name}: mail_domain")
        values.set("mail_user", f"{address or user_name()}@{site.mail_domain}", source)


def notify_words(spec: JobSpec, site: Site, name: str) -> tuple[str, ...]:
    """Return the options of ``notify.sh``; empty: the job itself sends no reports.

    Raises RequestError: a report that cannot be made.
    """
    on = ",".join(events(spec))
    targets = tuple(arg for text in spec.notify for arg in _target(text))
    return ("--name", name, "--site", site.name, "--on", on, *targets) if targets else ()


def _target(text: str) -> Iterator[str]:
    kind, _, value = text.partition(":")
    if kind not in _KINDS:
        shown = kind if len(kind) < 20 else "…"
        raise RequestError(f"--notify {shown}: unknown", hint="write mail, mail:ADDRESS, command:TEXT or webhook:FILE")
    if kind == "mail":
        return
    if not value:
        raise RequestError(f"--notify {kind}: it lacks what follows the colon", hint=f"{kind}:" + _EXAMPLES[kind])
    yield f"--{kind}"
    yield value if kind == "command" else _webhook(value)


_EXAMPLES = {"command": "'touch done'", "webhook": "~/.config/hpcjobs/webhook"}


def _webhook(value: str) -> str:
    """Source of the address on the node: ``file:PATH`` or ``env:NAME``; messages never contain the address."""
    if "://" in value:
        raise RequestError("--notify webhook: the address itself is on the command line", hint=_SECRET)
    if value.startswith("$"):
        name = value[1:].strip("{}")
        if not os.environ.get(name):
            raise RequestError(f"--notify webhook:{value}: {name} is not set here", hint=f"export {name}=…")
        _check_address(os.environ[name], value)
        return f"env:{name}"
    path = Path(value).expanduser().absolute()
    try:
        address = path.read_text(encoding="utf-8").partition("\n")[0]
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--notify webhook: {path}: {reason_of(error)}") from error
    if mode & 0o077:
        raise RequestError(
            f"--notify webhook: {path} can be read by others", hint=f"chmod 600 {shlex.quote(str(path))}"
        )
    _check_address(address, str(path))
    return f"file:{path}"


def _check_address(address: str, where: str) -> None:
    if not _ADDRESS.fullmatch(address.strip()):
        raise RequestError(f"--notify webhook: {where} holds no https:// address in its first line")
