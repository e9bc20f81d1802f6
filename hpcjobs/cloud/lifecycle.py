"""Plans, builds and takes down a cluster with Terraform; Terraform's state is in the cluster's folder.

The head of the cluster is reached over ssh: the wheel that it waits for, its queue, a first job.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hpcjobs.cloud.check import Report, check
from hpcjobs.cloud.render import default_folder, render, wheel_of, write
from hpcjobs.cloud.section import PROVIDERS, Cluster
from hpcjobs.errors import CommandMissingError, ConfigError, HpcJobsError, RequestError
from hpcjobs.files import config_dir, write_beside
from hpcjobs.guards import refuse_change
from hpcjobs.packing import Wheel
from hpcjobs.processes.programs import Result, Runner, run, run_in_terminal
from hpcjobs.slurm_commands import list_queue
from hpcjobs.units import format_count

_PROGRAMS = ("terraform", "tofu")


def program() -> str:
    """Return ``terraform`` if it is on PATH, otherwise ``tofu``.

    Raises CommandMissingError: neither is installed.
    """
    for name in _PROGRAMS:
        if shutil.which(name):
            return name
    raise CommandMissingError(
        "neither terraform nor tofu is on PATH",
        hint="install one: developer.hashicorp.com/terraform/install or opentofu.org/docs/intro/install",
    )


def stream(folder: Path, *arguments: str) -> None:
    """Run one Terraform command in ``folder`` on this terminal, with progress, questions and colours.

    Files it makes, the state among them, are readable to their owner alone.

    Raises HpcJobsError: it ended with an error, which it has printed.
    """
    before = os.umask(0o077)
    try:
        code = run_in_terminal([program(), *arguments], cwd=str(folder))
    finally:
        os.umask(before)
    if code:
        raise HpcJobsError(f"{program()} {arguments[0]} ended with {code} in {folder}")


def outputs(folder: Path) -> Mapping[str, Any]:
    """Output name -> value of the cluster applied in ``folder``; empty before the first apply.

    Raises HpcJobsError: there is a state, and Terraform cannot read it.
    """
    done = run([program(), "output", "-json", "-no-color"], cwd=str(folder))
    if done.code:
        raise HpcJobsError(f"{program()} output ended with {done.code} in {folder}: {done.err.strip()}")
    return {name: output["value"] for name, output in json.loads(done.out or "{}").items()}


def secure_state(folder: Path) -> None:
    """Make the state files readable by their owner only."""
    for path in folder.glob("*.tfstate*"):
        path.chmod(0o600)


PATIENCE_S = 1800.0
"""Seconds that machines may take to start and install themselves; bootstrap.sh waits as long."""
_PAUSE_S = 5.0
_READY = "test -e .cluster-ready"


class HeadNode:
    """The node that people log in to.

    The cluster's own known_hosts, in its folder, keeps the key that the head showed first: the user's file may know
    another machine by the same address.
    """

    def __init__(
        self, ssh: str, folder: Path, *, runner: Runner = run, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.ssh = ssh
        """The command that logs in, as a person types it."""
        self._folder = folder.absolute()
        self._login = shlex.split(ssh)
        known = f'UserKnownHostsFile="{self._folder / "known_hosts"}"'  # quoted for ssh: a folder may have a space
        self._options = ["-o", known, "-o", "StrictHostKeyChecking=accept-new"]
        self._options += ["-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=30"]
        self._runner = runner
        self._pause = pause

    def run(self, *arguments: str) -> Result:
        """Run a command there, without questions."""
        return self._runner([*self._login[:1], "-o", "BatchMode=yes", *self._options, *self._login[1:], *arguments])

    def deliver(self, wheel: Wheel, say: Callable[[str], None]) -> None:
        """Copy ``wheel`` into the user's home, as soon as the head lets somebody in.

        Raises HpcJobsError: no login succeeds within `PATIENCE_S`; names the command that copies it by hand.
        """
        local, login = str(self._folder / wheel.name), self._login[-1]
        part = f".{wheel.name}.part"
        say(f"waiting for the head, to copy {wheel.name} there")
        copy = ["scp", "-q", "-o", "BatchMode=yes", *self._options, local, f"{login}:{part}"]
        error = self._await(lambda: self._runner(copy)) or self._await(lambda: self.run("mv", part, wheel.name))
        if error is not None:
            raise HpcJobsError(
                f"{wheel.name} was not copied to the head: {error}",
                hint=f"the machines wait for it: scp {shlex.quote(local)} {login}:",
            )

    def run_when_ready(self, arguments: Sequence[str], say: Callable[[str], None]) -> int:
        """Wait until the head has installed itself, run ``arguments`` there with this terminal, return the exit code.

        Raises HpcJobsError: it is not ready within `PATIENCE_S`.
        """
        say("waiting until the head has installed itself")
        error = self._await(lambda: self.run(_READY))
        if error is not None:
            raise HpcJobsError(
                f"the head is not ready after {PATIENCE_S / 60:.0f} minutes: {error}",
                hint=f"{self.ssh} tail /var/log/hpcjobs-bootstrap.log",
            )
        say(shlex.join(arguments))
        argv = [*self._login[:1], *self._options, *self._login[1:], shlex.join(arguments)]
        return run_in_terminal(argv)

    def _await(self, attempt: Callable[[], Result]) -> str | None:
        """Repeat ``attempt`` until it succeeds; the last error when it does not within `PATIENCE_S`."""
        end = time.monotonic() + PATIENCE_S
        while (result := attempt()).code:
            if time.monotonic() > end:
                return result.err.strip() or f"exit code {result.code}"
            self._pause(_PAUSE_S)
        return None


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

    Raises ConfigError: the check found errors.
    """
    files = render(cluster)
    report = check(cluster, files)
    if report.failed:
        wrong = "\n".join(f"  {f.about}: {f.text}" for f in report.findings if f.level == "error")
        raise ConfigError(f"{cluster.site.path}: cluster {cluster.name} cannot be built as it is:\n{wrong}")
    out = folder or default_folder(cluster.name)
    site_files = dict.fromkeys(str(path.resolve()) for path in (Path(cluster.site.path), _own_copy(cluster)))
    identity = StateOwner(cluster.cloud.provider, cluster.cloud.region, cluster.cloud.project, tuple(site_files))
    _refuse_other_cluster(identity, out, by_site_file=folder is None)
    write(files | {_IDENTITY: msgspec.json.encode(identity).decode()}, out, wheel_of(cluster))
    return out, report


def _refuse_other_cluster(identity: StateOwner, out: Path, *, by_site_file: bool) -> None:
    """Refuse a folder with the state of another cluster: Terraform would change that cluster into this one.

    Raises RequestError: names each difference.
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
    stream(out, "plan", *variables(cluster, out, nodes))
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

    Raises ConfigError: the check found errors, or a line of the site file would end it inside the start-up script.
    RequestError: nodes would be taken away while jobs are in the queue, or the queue cannot be read (``force`` skips
    this check); or the folder has the state of another cluster. HpcJobsError: Terraform failed, or the user answered
    no.
    """
    refuse_change("cloud up")
    out, _ = prepare(cluster, folder)
    _init(out)
    built = outputs(out) if is_built(out) else {}
    if not force and nodes is not None and nodes < len(built.get("nodes", ())):
        refuse_while_jobs_run(HeadNode(built["ssh"], out))
    answers = ["-auto-approve", "-input=false"] if confirmed else []
    try:
        stream(out, "apply", *variables(cluster, out, nodes), *answers)
    finally:
        secure_state(out)
    values = outputs(out)
    site_file = remember_login(cluster, f"{cluster.cloud.ssh.user}@{values['head_address']}")
    return BuiltCluster(out, site_file, values["head_address"], values["nodes"], values["ssh"], values["submit"])


def variables(cluster: Cluster, folder: Path, nodes: int | None) -> list[str]:
    """Terraform arguments of one call: the number of nodes, and arguments from the environment."""
    built = len(outputs(folder).get("nodes", ())) if (folder / "terraform.tfstate").is_file() else 0
    count = nodes if nodes is not None else built or cluster.cloud.nodes.min
    return ["-var", f"nodes={count}", *PROVIDERS[cluster.cloud.provider].find_arguments(os.environ)]


def down(folder: Path, *, confirmed: bool = False, force: bool = False) -> None:
    """Take down everything of the state in ``folder``, the shared filesystem included.

    The values come from the state, so a changed or missing site file makes no difference. Terraform asks first unless
    ``confirmed``.

    Raises RequestError: jobs are in the cluster's queue, or it cannot be read; ``force`` skips this check.
    HpcJobsError: the folder has no state, Terraform failed, or the user answered no.
    """
    refuse_change("cloud down")
    if not (folder / "terraform.tfstate").is_file():
        raise HpcJobsError(f"nothing is built in {folder}: it has no state", hint="--dir says another folder")
    built = outputs(folder)
    if not force and (ssh := built.get("ssh")) is not None:
        refuse_while_jobs_run(HeadNode(ssh, folder))
    arguments = [] if "variables" in built else ["-var", f"nodes={len(built.get('nodes', ()))}"]
    if "variables" in built:
        values = {name: value for name, value in built["variables"].items() if value is not None}
        write_beside(folder / _APPLIED, json.dumps(values))
        arguments = [f"-var-file={_APPLIED}"]
    try:
        stream(folder, "destroy", *arguments, *(["-auto-approve", "-input=false"] if confirmed else []))
    finally:
        secure_state(folder)


def refuse_while_jobs_run(head: HeadNode) -> None:
    """Ask the cluster's own queue.

    Raises RequestError: jobs are in the queue, or it cannot be read.
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
    stream(folder, "init", "-input=false")
