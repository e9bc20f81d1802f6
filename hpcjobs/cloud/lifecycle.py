"""Plans, builds and takes down a cluster with Terraform; Terraform's state is in the cluster's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcjobs.cloud import terraform
from hpcjobs.cloud.check import Report, check
from hpcjobs.cloud.cluster import Cluster
from hpcjobs.cloud.head import HeadNode
from hpcjobs.cloud.render import default_folder, render, wheel_of, write
from hpcjobs.cloud.section import PROVIDERS
from hpcjobs.errors import ConfigError, HpcJobsError, RequestError
from hpcjobs.files import config_dir, write_beside
from hpcjobs.guards import refuse_change
from hpcjobs.slurm_commands import list_queue
from hpcjobs.units import format_count

_TOP_LEVEL_LOGIN = re.compile(r"(?m)^login:.*$")


_IDENTITY = "cluster.json"
_APPLIED = "applied.tfvars.json"
"""The values that the cluster was built with, for the command that takes it down."""


class StateOwner(msgspec.Struct, frozen=True):
    """The cluster that a state of Terraform belongs to."""

    provider: str
    region: str
    project: str | None
    site_files: tuple[str, ...]
    """The site file that the cluster was built from, and the user's copy of it."""


class BuiltCluster(NamedTuple):
    """A cluster that is up."""

    folder: Path
    site_file: Path
    """The user's copy of the site, which knows the address."""
    head_address: str
    nodes: dict[str, str]
    """Name -> address inside the cluster."""
    ssh: str
    submit: str


def prepare(cluster: Cluster, folder: Path | None = None) -> tuple[Path, Report]:
    """Render into the cluster's folder and check it.

    Raises:
        ConfigError: the check found errors.
    """
    files = render(cluster)
    report = check(cluster, files)
    if report.failed:
        wrong = "\n".join(f"  {f.about}: {f.text}" for f in report.findings if f.level == "error")
        raise ConfigError(f"{cluster.site.path}: cluster {cluster.name} cannot be built as it is:\n{wrong}")
    out = folder or default_folder(cluster.name)
    identity = _identify(cluster)
    _refuse_other_cluster(identity, out, by_site_file=folder is None)
    write(files | {_IDENTITY: msgspec.json.encode(identity).decode()}, out, wheel_of(cluster))
    return out, report


def _identify(cluster: Cluster) -> StateOwner:
    own = _own_copy(cluster)
    files = dict.fromkeys(str(path.resolve()) for path in (Path(cluster.site.path), own))
    return StateOwner(cluster.cloud.provider, cluster.cloud.region, cluster.cloud.project, tuple(files))


def _refuse_other_cluster(identity: StateOwner, out: Path, *, by_site_file: bool) -> None:
    """Refuse a folder with the state of another cluster: Terraform would change that cluster into this one.

    Raises:
        RequestError: names each difference.
    """
    if not is_built(out) or not (out / _IDENTITY).is_file():
        return
    built = msgspec.json.decode((out / _IDENTITY).read_bytes(), type=StateOwner)
    pairs = [(key, getattr(built, key), getattr(identity, key)) for key in ("provider", "project", "region")]
    differences = [f"{key} {before}, not {now}" for key, before, now in pairs if before != now]
    if by_site_file and identity.site_files[0] not in built.site_files:
        differences.append(f"site file {built.site_files[0]}, not {identity.site_files[0]}")
    if differences:
        raise RequestError(
            f"{out} has the state of another cluster of this name: {'; '.join(differences)}",
            hint="--dir names a folder for this one; hpcjobs cloud down takes the other one down",
        )


def is_built(folder: Path) -> bool:
    """Whether the state in ``folder`` has a resource."""
    state = folder / "terraform.tfstate"
    return state.is_file() and bool(json.loads(state.read_bytes() or b"{}").get("resources"))


def plan(cluster: Cluster, folder: Path | None = None, *, nodes: int | None = None) -> Path:
    """Print Terraform's plan without building anything; return the folder."""
    out, _ = prepare(cluster, folder)
    _init(out)
    terraform.stream(out, "plan", *variables(cluster, out, nodes))
    return out


def up(
    cluster: Cluster,
    folder: Path | None = None,
    *,
    nodes: int | None = None,
    confirmed: bool = False,
    force: bool = False,
) -> BuiltCluster:
    """Build the cluster, or change it to match the site file; Terraform asks first unless ``confirmed``.

    ``nodes``: how many worker nodes to have; None: as many as there are, and at first the site's ``nodes.min``.

    Raises:
        ConfigError: the check found errors, or a line of the site file would end it inside the start-up script.
        RequestError: nodes would be taken away while jobs are in the queue, or the queue cannot be read (``force``
            skips this check); or the folder has the state of another cluster.
        HpcJobsError: Terraform failed, or the user answered no.
    """
    refuse_change("cloud up")
    out, _ = prepare(cluster, folder)
    _init(out)
    built = terraform.outputs(out) if is_built(out) else {}
    if not force and nodes is not None and nodes < len(built.get("nodes", ())):
        refuse_while_jobs_run(HeadNode(built["ssh"], out))
    answers = ["-auto-approve", "-input=false"] if confirmed else []
    try:
        terraform.stream(out, "apply", *variables(cluster, out, nodes), *answers)
    finally:
        terraform.secure_state(out)
    values = terraform.outputs(out)
    site_file = remember_login(cluster, f"{cluster.cloud.ssh.user}@{values['head_address']}")
    return BuiltCluster(out, site_file, values["head_address"], values["nodes"], values["ssh"], values["submit"])


def variables(cluster: Cluster, folder: Path, nodes: int | None) -> list[str]:
    """Terraform arguments of one call: the number of nodes, and arguments from the environment."""
    built = len(terraform.outputs(folder).get("nodes", ())) if (folder / "terraform.tfstate").is_file() else 0
    count = nodes if nodes is not None else built or cluster.cloud.nodes.min
    return ["-var", f"nodes={count}", *PROVIDERS[cluster.cloud.provider].find_arguments(os.environ)]


def down(folder: Path, *, confirmed: bool = False, force: bool = False) -> None:
    """Take down everything of the state in ``folder``, the shared filesystem included.

    The values come from the state, so a changed or missing site file makes no difference. Terraform asks first unless
    ``confirmed``.

    Raises:
        RequestError: jobs are in the cluster's queue, or it cannot be read; ``force`` skips this check.
        HpcJobsError: the folder has no state, Terraform failed, or the user answered no.
    """
    refuse_change("cloud down")
    if not (folder / "terraform.tfstate").is_file():
        raise HpcJobsError(f"nothing is built in {folder}: it has no state", hint="--dir says another folder")
    built = terraform.outputs(folder)
    if not force and (ssh := built.get("ssh")) is not None:
        refuse_while_jobs_run(HeadNode(ssh, folder))
    arguments = [] if "variables" in built else ["-var", f"nodes={len(built.get('nodes', ()))}"]
    if "variables" in built:
        values = {name: value for name, value in built["variables"].items() if value is not None}
        write_beside(folder / _APPLIED, json.dumps(values))
        arguments = [f"-var-file={_APPLIED}"]
    try:
        terraform.stream(folder, "destroy", *arguments, *(["-auto-approve", "-input=false"] if confirmed else []))
    finally:
        terraform.secure_state(folder)


def refuse_while_jobs_run(head: HeadNode) -> None:
    """Ask the cluster's own queue.

    Raises:
        RequestError: jobs are in the queue, or it cannot be read.
    """
    result = head.run(*list_queue(("JobID", "State", "User", "JobName"), "_"))
    if result.code:
        raise RequestError(
            f"the queue cannot be read, so jobs may run: {head.ssh}: {result.err.strip() or result.code}",
            hint="--force does it all the same",
        )
    if jobs := result.out.splitlines():
        listed = ", ".join(jobs[:5]) + (" ..." if len(jobs) > 5 else "")
        raise RequestError(
            f"{format_count(len(jobs), 'job')} in the queue: {listed}",
            hint="wait for them or cancel them; --force does it all the same",
        )


def remember_login(cluster: Cluster, login: str) -> Path:
    """Write ``login`` into the user's copy of the site file, made now if missing; return its path.

    A site file in ``./site_configs`` is changed itself.
    """
    used, own = Path(cluster.site.path), _own_copy(cluster)
    text = (own if own.is_file() else used).read_text(encoding="utf-8")
    line = f"login: {login}"
    changed, count = _TOP_LEVEL_LOGIN.subn(lambda _: line, text, count=1)
    own.parent.mkdir(parents=True, exist_ok=True)
    write_beside(own, changed if count else f"{text.rstrip()}\n{line}\n", mode=0o644)
    return own


def _own_copy(cluster: Cluster) -> Path:
    used = Path(cluster.site.path)
    folder = used.parent if used.parent == Path.cwd() / "site_configs" else config_dir() / "site_configs"
    return folder / used.name


def print_next_steps(built: BuiltCluster, say: Callable[[str], None]) -> None:
    """The lines a person needs after ``up``."""
    say(f"head {built.head_address}, {format_count(len(built.nodes), 'node')}: {', '.join(built.nodes)}")
    say(f"state and files: {built.folder}")
    say(f"site: {built.site_file}")
    say(f"log in: {built.ssh}   (the nodes need some minutes: /var/log/hpcjobs-bootstrap.log)")
    say(f"first job: {built.submit}")


def _init(folder: Path) -> None:
    terraform.stream(folder, "init", "-input=false")
